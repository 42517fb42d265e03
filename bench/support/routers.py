"""How the routers that Stoker's gateway is compared with are started.

`--router NAME` takes one of the commands below; its program must be on PATH (install each competitor into a virtual
environment of its own and put their bin folders on PATH). `--router NAME=COMMAND` gives any other command, in which
{port} is the port to listen on, {port2} another free port, {workers} the workers' URLs, and {workers:OPTION,SUFFIX}
the same with OPTION before and ,SUFFIX behind each.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.contract import BenchmarkError
from bench.support.processes import free_port, stoker_command

ROUND_ROBIN = "--policy round_robin"
_HOST = "--host 127.0.0.1 --port {port} --worker-urls {workers}"
COMMANDS = {
    "stoker": f"{stoker_command()} gateway --port {{port}} {{workers:--worker,dialect=openai}}",
    "vllm-router": f"vllm-router {_HOST} {{policy}} --prometheus-port {{port2}} --log-level warning",
    "smg": f"smg launch {_HOST} {{policy}} --prometheus-port {{port2}} --log-level warn",
    "litellm": "litellm --config {litellm_config} --host 127.0.0.1 --port {port} --telemetry False",
}
ENVIRONMENT = {  # LiteLLM refuses to start without a master key, and looks for prices on the network
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def parse(given: Sequence[str]) -> dict[str, str]:
    """NAME or NAME=COMMAND -> the command of each name."""
    found = {}
    for item in given:
        name, equals, command = item.partition("=")
        if not equals:
            if name not in COMMANDS:
                raise BenchmarkError(f"--router {name}: no command is known for it; give NAME=COMMAND")
            command = COMMANDS[name]
            program = shlex.split(command)[0]
            if shutil.which(program) is None:
                raise BenchmarkError(f"--router {name}: {program} is not on PATH")
        found[name] = command
    return found


def fill(command: str, port: int, urls: Sequence[str], folder: Path, policy: str = "") -> list[str]:
    """The words of the command, with the ports and the workers' URLs in place."""

    def workers(found: re.Match[str]) -> str:
        option, _, suffix = (found.group(1) or "").partition(",")
        return " ".join(f"{option} {url}{',' + suffix if suffix else ''}" for url in urls)

    text = re.sub(r"\{workers(?::([^}]*))?\}", workers, command)
    for number, url in enumerate(urls):
        text = text.replace(f"{{worker{number}}}", url)
    if "{litellm_config}" in text:
        text = text.replace("{litellm_config}", shlex.quote(str(_litellm_config(folder, urls))))
    text = text.replace("{policy}", policy).replace("{port2}", str(free_port())).replace("{port}", str(port))
    words = shlex.split(text)
    if command == COMMANDS["litellm"]:
        words = ["env", *(f"{name}={value}" for name, value in ENVIRONMENT.items()), *words]
    return words


def _litellm_config(folder: Path, urls: Sequence[str]) -> Path:
    """LiteLLM reads its workers from a YAML file; JSON is YAML."""
    models = [
        {"model_name": "mock", "litellm_params": {"model": "openai/mock", "api_base": f"{url}/v1", "api_key": "x"}}
        for url in urls
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "litellm.yaml"
    path.write_text(json.dumps({"model_list": models, "router_settings": {"routing_strategy": "simple-shuffle"}}))
    return path
