"""The head that is trained is the head that is served: unrolled steps give the drafts of the plain reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.eagle3_files import Format, PlainHead
from safetensors.torch import load_file
from tiny import make_tiny

from stoker.base.config import EngineSettings, KvSettings
from stoker.engine.build import BuiltEngine, build_engine
from stoker.engine.model_identity import read_hf_config
from stoker.models import eagle3_config
from stoker.models.eagle3_weights import Eagle3Checkpoint
from stoker.models.family import family_of
from stoker.train.draft_vocab import DraftVocab
from stoker.train.head_files import head_config, write_head
from stoker.train.target_forward import TargetForward
from stoker.train.trainable_head import TrainableHead, default_taps
from stoker.train.unroll import Answer, make_batch, unrolled_loss

VOCAB, LAYERS, NUM_HEADS, DRAFT_VOCAB = 199, 4, 4, 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BuiltEngine, Any]:
    folder = tmp_path_factory.mktemp("target")
    # Heads of the same shape as those of the reference in eagle3_files.py.
    shape = {"num_attention_heads": NUM_HEADS, "intermediate_size": 88, "rope_theta": 5000.0}
    reference = make_tiny(folder, "llama", torch.float64, num_hidden_layers=LAYERS, **shape)
    settings = EngineSettings(device="cpu", dtype="float64", num_threads=1, drafter="off", kv=KvSettings(16, 8))
    return folder, build_engine(folder, settings), reference


@pytest.fixture
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def new_head(folder: Path, vocab: DraftVocab) -> tuple[TrainableHead, dict[str, Any]]:
    hf = read_hf_config(folder)
    shape = family_of(hf, "target").shape
    config = head_config(hf, shape, len(vocab.ids))
    head = TrainableHead(eagle3_config.read_eagle3_config(config, shape), 64, torch.Generator().manual_seed(4))
    with torch.no_grad():  # as after some training: no weight is trivial, and bfloat16 stores all of them exactly
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.05)
            parameter.copy_(parameter.bfloat16())
    return head, config


def layer_inputs(reference: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """Return what enters each layer of the target model, and what leaves the last one, [tokens, hidden] each."""
    last: list[torch.Tensor] = []  # transformers gives it only after the norm
    hook = reference.model.layers[-1].register_forward_hook(
        lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        found = reference(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    hook.remove()
    return [*(x[0] for x in found[:-1]), last[0].view(len(token_ids), -1)]


@pytest.mark.usefixtures("double")
def test_unrolled_steps_are_the_drafts_of_the_served_head(
    target: tuple[Path, BuiltEngine, Any], tmp_path: Path
) -> None:
    folder, built, reference = target
    vocab = DraftVocab(torch.arange(0, 3 * DRAFT_VOCAB, 3), VOCAB, 1.0)
    head, config = new_head(folder, vocab)
    forward = TargetForward(built, NUM_HEADS, head.config.taps, 2, 64, 32)
    generator = torch.Generator().manual_seed(6)
    answers = [
        Answer(torch.randint(0, VOCAB, (length,), generator=generator).tolist(), prompt)
        for length, prompt in ((20, 4), (13, 1))
    ]
    batch = make_batch(forward, answers, vocab, torch.float64)
    features, memory, logits = head.features(batch.features), [], []
    for step in range(3):
        embedded = torch.cat([batch.embedded[:, step + 1 :], torch.zeros_like(batch.embedded[:, : step + 1])], 1)
        features = head.step(embedded, features, step, memory)
        logits.append(head.logits(features))

    write_head(tmp_path, head, vocab, config)
    tensors = {
        name.replace("midlayer.", "layers.0."): x for name, x in load_file(tmp_path / "model.safetensors").items()
    }
    tensors = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    form = Format(config, taps=tuple(default_taps(LAYERS)), draft_vocab=DRAFT_VOCAB, own_embedding=False)
    plain = PlainHead(form, tensors, reference.model.embed_tokens.weight, reference.lm_head.weight)
    for number, answer in enumerate(answers):
        ids = answer.token_ids
        inputs = layer_inputs(reference, ids)
        for row in range(0, len(ids) - 4, 3):
            known = ids[: row + 2]
            true = plain.features({layer: inputs[layer][: row + 1] for layer in form.taps})
            _, expected = plain.draft(known, true, 3, lambda _, position, ids=ids: ids[position])
            for step in range(3):
                found = logits[step][number, row]
                assert (found - expected[step][vocab.ids]).abs().max() < 1e-6, (number, row, step)


@pytest.mark.usefixtures("double")
def test_the_loss_is_a_soft_cross_entropy_over_the_answer(target: tuple[Path, BuiltEngine, Any]) -> None:
    """Computed again with loops. Padding and prompts count nothing."""
    folder, built, reference = target
    vocab = DraftVocab(torch.arange(0, 3 * DRAFT_VOCAB, 3), VOCAB, 1.0)
    head, _ = new_head(folder, vocab)
    forward = TargetForward(built, NUM_HEADS, head.config.taps, 2, 64, 32)
    generator = torch.Generator().manual_seed(7)
    answers = [
        Answer(torch.randint(0, VOCAB, (length,), generator=generator).tolist(), prompt)
        for length, prompt in ((15, 6), (9, 3))
    ]
    batch = make_batch(forward, answers, vocab, torch.float64)
    result = unrolled_loss(head, batch, 2, 0.5)
    features, memory, total = head.features(batch.features), [], 0.0
    for step in range(2):
        embedded = torch.cat([batch.embedded[:, step + 1 :], torch.zeros_like(batch.embedded[:, : step + 1])], 1)
        features = head.step(embedded, features, step, memory)
        losses, right, guesses = [], 0, 0
        for number, answer in enumerate(answers):
            with torch.no_grad():
                wanted = reference(torch.tensor([answer.token_ids])).logits[0]
            for row in range(answer.num_prompt - 1, len(answer.token_ids) - 2 - step):
                guesses += 1
                found, theirs = head.logits(features[number, row][None])[0], wanted[row + 1 + step]
                best = int(theirs.argmax())
                if best in vocab.ids.tolist():
                    losses.append(-(theirs[vocab.ids].softmax(0) * found.log_softmax(0)).sum())
                    right += int(vocab.ids[found.argmax()]) == best
        assert (result.guesses[step], result.right[step]) == (guesses, right)
        assert losses, "no best token can be drafted: the test shows nothing"
        total += 0.5**step * torch.stack(losses).mean()
    assert (result.loss - total / 1.5).detach().abs() < 1e-5


def test_a_written_head_is_loaded_by_the_engines_loader(target: tuple[Path, BuiltEngine, Any], tmp_path: Path) -> None:
    folder, built, _ = target
    for name, ids in (("part", torch.arange(5, 5 + DRAFT_VOCAB)), ("whole", torch.arange(VOCAB))):
        vocab = DraftVocab(ids, VOCAB, 1.0)
        head, config = new_head(folder, vocab)
        write_head(tmp_path / name, head, vocab, config)
        checkpoint = Eagle3Checkpoint(config, tmp_path / name, family_of(read_hf_config(folder), "target").shape)
        served = checkpoint.build(built.model, 64)  # type: ignore[arg-type]
        checkpoint.load(served, lambda done, total: None)
        served.pack()
        assert served.config.taps == tuple(default_taps(LAYERS))
        assert (served.d2t is None) == vocab.is_whole
        assert served.d2t is None or served.d2t.tolist() == ids.tolist()


@pytest.mark.parametrize("num_layers", range(1, 40))
def test_the_tapped_layers_exist(num_layers: int) -> None:
    taps = list(default_taps(num_layers))
    assert taps == sorted(set(taps))
    assert 1 <= taps[0] <= taps[-1] <= num_layers
    assert num_layers < 8 or taps == [2, num_layers // 2, num_layers - 3]
