"""The kernels of latent attention also run on a CPU, in Triton's interpreter; what it cannot notice is compiled."""

from importlib.util import find_spec

import pytest
from kernels.test_moe_kernels import run

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def test_the_kernels_of_latent_attention_agree_with_their_references() -> None:
    run("mla_interpreted.py", interpreted=True)


@pytest.mark.slow
def test_the_kernels_of_latent_attention_compile_for_a_gpu() -> None:
    """Slow, because the compiler takes seconds for each of the large tiles."""
    run("mla_compiled.py", interpreted=False)
