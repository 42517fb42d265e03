"""The engine's settings. None means automatic: it is resolved once, at start, from the model and the hardware."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.address import split_address
from stoker.base.errors import ConfigError
from stoker.base.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class KvSettings:
    """The KV cache in the device's memory."""

    block_tokens: int | None = setting(
        None,
        "Tokens in one KV block.",
        flag="--block-tokens",
        unit="tokens",
        ge=1,
        default_text="64 on a GPU, 16 on a CPU",
    )
    num_blocks: int | None = setting(
        None,
        "Number of KV blocks. Layers with a window or chunks have further blocks of their own, at most as many.",
        flag="--kv-blocks",
        ge=1,
        default_text="as many as the memory holds",
    )
    memory_gib: float | None = setting(
        None,
        "Memory for the KV cache. Ignored with --kv-blocks.",
        flag="--kv-memory-gib",
        unit="GiB",
        gt=0,
        default_text="on a GPU what the weights and the working memory leave free; on a CPU a share of the free RAM",
    )
    mean_tokens: int | None = setting(
        None,
        "Mean length of the sequences to divide the KV cache's memory for, in models with layers that have a window or chunks. "
        "Shorter sequences need a larger part of it for these layers. Ignored with --kv-blocks.",
        flag="--kv-mean-tokens",
        unit="tokens",
        ge=1,
        default_text="131072, or the longest sequence if that is shorter",
        renamed_from=("--kv-local-share",),
    )
    gpu_memory_gib: float | None = setting(
        None,
        "Upper limit for all GPU memory of this worker: weights, working memory and KV cache. Use it when several "
        "processes share a GPU.",
        flag="--gpu-memory-gib",
        unit="GiB",
        gt=0,
        default_text="what is free",
        renamed_from=("--card-memory-gib",),
    )
    dtype: str = setting(
        "auto",
        "Data type of the KV cache. auto is that of --dtype; another one must take fewer bytes. The 8-bit types, int8 and "
        "fp8_e4m3, hold nearly twice the tokens of bfloat16 and change answers slightly, int8 less so. Workers share KV only "
        "if they have the same type.",
        flag="--kv-dtype",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3"),
    )

    def __post_init__(self) -> None:
        check_settings(self, "kv")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The KV store: tiers below the device's memory. By default there are none, and evicted KV is lost."""

    name: str | None = setting(
        None,
        "Share the host tier's RAM with all workers on this machine that give the same name. It is kept when the workers "
        "exit; `stoker kv` lists and frees it.",
        flag="--kv-store",
        default_text="RAM of this worker only",
    )
    host_gib: float = setting(0.0, "RAM for the host tier. 0 turns it off.", flag="--kv-host-gib", unit="GiB", ge=0)
    disk_dir: str | None = setting(
        None,
        "Folder of the disk tier. Workers with the same folder share it.",
        flag="--kv-disk",
        metavar="DIR",
        is_path=True,
        default_text="no disk tier",
    )
    disk_gib: float = setting(16.0, "Disk space for the disk tier.", flag="--kv-disk-gib", unit="GiB", gt=0)
    disk_key_file: str | None = setting(
        None,
        "File with a 32-byte key. The disk tier's files are encrypted with it.",
        flag="--kv-disk-key-file",
        metavar="FILE",
        is_path=True,
        default_text="not encrypted",
    )
    mooncake_master: str | None = setting(
        None,
        "Address of a Mooncake master. Its store becomes a tier.",
        flag="--kv-mooncake",
        metavar="HOST:PORT",
        pattern=r".+:\d{1,5}",
        expected="HOST:PORT",
        default_text="no Mooncake tier",
    )
    mooncake_host: str = "127.0.0.1"  # where other workers reach this worker's segment
    mooncake_segment_gib: float = setting(
        0.0, "RAM that this worker adds to the Mooncake store.", flag="--kv-mooncake-segment-gib", unit="GiB", ge=0
    )
    mooncake_protocol: str = setting(
        "tcp",
        "How Mooncake moves bytes: tcp or rdma.",
        flag="--kv-mooncake-protocol",
        pattern=".+",
        expected="tcp or rdma",
    )
    mooncake_ssd_dir: str | None = setting(
        None,
        "Folder where Mooncake may put objects that its RAM cannot hold.",
        flag="--kv-mooncake-ssd",
        metavar="DIR",
        is_path=True,
        default_text="RAM only",
    )
    tiers: tuple[str, ...] = setting(
        (),
        "A further tier, for tiers that have no settings of their own here. Repeatable.",
        flag="--kv-tier",
        metavar="NAME[,KEY=VALUE...]",
        default_text="none",
    )

    def __post_init__(self) -> None:
        check_settings(self, "store")


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """How KV moves from a prefill worker to a decode worker."""

    host: str = "127.0.0.1"  # where peers reach this worker's KV server
    port: int = setting(
        0,
        "Port where other workers pull KV. 0 picks a free port.",
        flag="--kv-port",
        ge=0,
        le=65535,
        default_text="a free port; no port with several ranks",
    )
    transports: tuple[str, ...] = setting(
        ("local", "cuda_ipc", "tcp"),
        "Transports in the order of preference, separated by commas. The first one that both workers support is used.",
        flag="--kv-transports",
        metavar="NAMES",
        commas=True,
        pattern=".+",
        expected="names separated by commas, such as tcp,local",
    )
    secret: str | None = None  # shared by all workers that may pull from each other
    lease_s: float = setting(
        30.0,
        "How long KV is kept for another worker that does not fetch it.",
        flag="--kv-lease-s",
        unit="s",
        gt=0,
    )
    serves: bool = False  # whether this worker keeps blocks for others: for hand-offs, and for requests that move
    prefills: bool = False  # whether hand-offs are its main work, so that its prefill speed is measured at the start
    insecure: bool = False  # whether other machines may reach the KV server although there is no secret

    def __post_init__(self) -> None:
        check_settings(self, "handoff")


@dataclass(frozen=True, slots=True)
class SchedSettings:
    """The scheduler's limits for one step."""

    step_tokens: int | None = setting(
        None,
        "Maximum tokens computed in one step. Smaller values give smoother streams, larger ones faster prefill.",
        flag="--step-tokens",
        unit="tokens",
        ge=1,
        default_text="8192 on a GPU, 512 on a CPU",
    )
    max_rows: int | None = setting(
        None,
        "Maximum batch size: sequences that run at the same time.",
        flag="--max-rows",
        ge=1,
        default_text="512 on a GPU, 64 on a CPU",
    )
    target_itl_ms: float | None = setting(
        None,
        "Goal for the time between two tokens of a sequence. It limits the prompt tokens of steps in which sequences decode. "
        "A smaller value gives smoother streams, a larger one faster prefill. A long queue of prompts gets larger steps.",
        flag="--target-itl-ms",
        unit="ms",
        gt=0,
        default_text="75 on a GPU, 250 on a CPU",
        renamed_from=("--mixed-tokens",),
    )

    def __post_init__(self) -> None:
        check_settings(self, "sched")


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How one model is split over several GPUs, or over several processes on a CPU."""

    tp: int = setting(
        1,
        "Tensor parallelism: ranks that split each layer. Each is a process with a GPU of its own; on a CPU they share the "
        "cores.",
        flag="--tp",
        metavar="N",
        ge=1,
        le=64,
    )
    pp: int = setting(
        1,
        "Pipeline parallelism: stages that split the layers. Each has --tp ranks.",
        flag="--pp",
        metavar="N",
        ge=1,
        le=64,
    )
    ep: int = setting(
        1,
        "Expert parallelism: groups that split the experts, within the --tp ranks of a stage. 1 splits the width of every "
        "expert instead.",
        flag="--ep",
        metavar="N",
        ge=1,
        le=64,
    )

    cp: int = setting(
        1,
        "Context split, for models with latent attention (MLA): N of the --tp ranks each hold 1/N of "
        "every KV block, so that the KV cache holds N times the tokens. Other models split their KV by heads.",
        flag="--cp",
        metavar="N",
        ge=1,
        le=64,
    )
    per_gpu: int = setting(
        1,
        "Ranks that share each GPU, and its memory in equal parts, to try a layout on a machine with fewer GPUs. It is slower than "
        "one rank per GPU. Start NVIDIA MPS, or the ranks take turns on the GPU. All ranks must be on one machine.",
        flag="--ranks-per-gpu",
        metavar="N",
        ge=1,
        le=8,
    )

    def __post_init__(self) -> None:
        check_settings(self, "ranks")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The machines that the ranks of one model run on. Each has an equal number of them."""

    count: int = setting(
        1,
        "Machines (nodes) that the ranks of --tp and --pp are divided over. Start `stoker serve` on each of them with the same "
        "settings and its own --node-rank.",
        flag="--nodes",
        metavar="K",
        ge=1,
        le=64,
    )
    rank: int = setting(
        0,
        "This machine's number. Node 0, the head, serves the API; the others only compute.",
        flag="--node-rank",
        metavar="R",
        ge=0,
        le=63,
    )
    head: str | None = setting(
        None,
        "Address of the head, the same on all nodes. The head listens there for the ranks of the other nodes. They must be able to "
        "reach it, and each other, on any port.",
        flag="--head",
        metavar="HOST:PORT",
        pattern=r"[^\s/:]+:\d{1,5}|\[[^\s/]+\]:\d{1,5}",
        expected="HOST:PORT, such as 10.0.0.7:7000",
    )
    wait_s: float = setting(
        300.0,
        "How long a node waits at its start for the other nodes.",
        flag="--node-wait-s",
        unit="s",
        gt=0,
    )
    key: str | None = None  # proves that a rank belongs to this engine; hexadecimal
    insecure: bool = False  # whether other machines may reach the head although there is no key

    def __post_init__(self) -> None:
        check_settings(self, "nodes")
        if self.rank >= self.count:
            raise ConfigError(
                f"--node-rank {self.rank} with --nodes {self.count}: nodes are counted from 0 to {self.count - 1}"
            )
        if self.count == 1:
            return
        if self.head is None:
            raise ConfigError(f"--nodes {self.count} needs --head HOST:PORT, the address of node 0")
        host, port = split_address(self.head)
        if not 0 < port < 65536:
            raise ConfigError(f"--head {self.head}: the port must be between 1 and 65535, the same on all nodes")
        if host in ("0.0.0.0", "::"):
            raise ConfigError(f"--head {self.head}: give the address at which the other nodes reach node 0")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything that the engine process is configured with."""

    device: str | None = setting(
        None, "Device: cpu, cuda or cuda:N.", flag="--device", default_text="cuda if there is a GPU, else cpu"
    )
    dtype: str | None = setting(
        None,
        "Data type of activations, and of KV unless --kv-dtype is given.",
        flag="--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        default_text="bfloat16 on a GPU, float32 on a CPU",
    )
    cpu_weights: str = setting(
        "auto",
        "How the quantised weights of a GGUF file are served on a CPU. int8 keeps them in 8 bits and rounds the inputs of "
        "each matmul to 8 bits. float32 dequantises them, which is closer to the file's values. auto measures the matmuls "
        "of both on the first start and takes the faster one; with --tp it is float32. Workers that share KV must use the same.",
        flag="--cpu-weights",
        choices=("auto", "int8", "float32"),
    )
    drafter: str | None = setting(
        None,
        "Speculative decoding: where drafts come from. off, or names separated by commas: auto (all of: prediction, "
        "cache, suffix, ngram, grammar), and eagle3:FOLDER for a draft model, or mtp for the layer for drafts that the "
        "model's own files have. Answers are the same with and without drafts; see docs/speculation.md.",
        flag="--drafter",
        metavar="off|auto|NAME[:ARG]",
        default_text="auto for 8-bit weights on a CPU (--cpu-weights), else off",
    )
    numerics: str = setting(
        "auto",
        "How matmuls and attention are summed. exact: the bits of a token's logits depend only on the tokens before it, not on "
        "the batch or on drafts. fast: each step uses the fastest kernels for its size, and logits may differ in their last "
        "bits between batch sizes. auto is exact if a drafter is loaded, else fast.",
        flag="--numerics",
        choices=("auto", "exact", "fast"),
    )
    max_model_tokens: int | None = setting(
        None,
        "Maximum length of a sequence: prompt and answer together.",
        flag="--max-model-tokens",
        unit="tokens",
        ge=1,
        default_text="the model's context length",
    )
    num_threads: int | None = setting(
        None, "CPU threads for one operation.", flag="--threads", ge=1, default_text="tuned at run time"
    )
    steps_ahead: int | None = setting(
        None,
        "Steps that are launched before the result of the oldest one is read.",
        flag="--steps-ahead",
        ge=0,
        default_text="1 on a GPU, 0 on a CPU",
    )
    spare_engine: str | None = setting(
        None,
        "Keep a second engine process ready, without a model, for an engine that dies and for another model (stoker model). "
        "It takes 640 MiB of GPU memory.",
        flag="--spare-engine",
        choices=("on", "off"),
        default_text="on with a GPU, off on a CPU",
    )
    kernel_archive: str | None = setting(
        None,
        "File of compiled kernels, from `stoker kernels build`. It is read before the one that comes with Stoker.",
        flag="--kernel-archive",
        metavar="FILE",
        is_path=True,
        default_text="none",
    )
    kv: KvSettings = field(default_factory=KvSettings)
    sched: SchedSettings = field(default_factory=SchedSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    handoff: HandoffSettings = field(default_factory=HandoffSettings)
    ranks: RankSettings = field(default_factory=RankSettings)
    nodes: NodeSettings = field(default_factory=NodeSettings)

    def __post_init__(self) -> None:
        check_settings(self, "engine")
        num_ranks = self.ranks.tp * self.ranks.pp
        if num_ranks % self.nodes.count:
            raise ConfigError(
                f"--tp {self.ranks.tp} --pp {self.ranks.pp} makes {num_ranks} ranks, which cannot be divided over --nodes "
                f"{self.nodes.count}: every node has the same number of ranks"
            )
        if num_ranks % self.ranks.per_gpu:
            raise ConfigError(
                f"--tp {self.ranks.tp} --pp {self.ranks.pp} makes {num_ranks} ranks, which --ranks-per-gpu "
                f"{self.ranks.per_gpu} cannot put on GPUs in equal numbers"
            )
        if self.ranks.per_gpu > 1 and self.nodes.count > 1:
            raise ConfigError(
                f"--ranks-per-gpu {self.ranks.per_gpu} with --nodes {self.nodes.count}: ranks share GPUs only if all are on one "
                "machine; leave out one of the two"
            )

    @property
    def ranks_per_node(self) -> int:
        return self.ranks.tp * self.ranks.pp // self.nodes.count
