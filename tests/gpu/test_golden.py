"""The golden checkpoints on the GPU: the tests of the CPU, with their criteria, where the harness puts the model."""

from __future__ import annotations

from tests.cpu.test_golden_blocks import test_block, test_block_in_bfloat16
from tests.cpu.test_golden_network import (
    test_bfloat16_with_forced_routing,
    test_chunks_and_decode_rows_in_one_step,
    test_greedy_continuations_by_cached_decode,
    test_latent_norm_eps_is_an_option,
    test_logits_of_any_tokens_or_none,
    test_prompt_in_chunks,
    test_rows_alone_and_as_one_batch,
    test_whole_prompt,
)

__all__ = [
    "test_bfloat16_with_forced_routing",
    "test_block",
    "test_block_in_bfloat16",
    "test_chunks_and_decode_rows_in_one_step",
    "test_greedy_continuations_by_cached_decode",
    "test_latent_norm_eps_is_an_option",
    "test_logits_of_any_tokens_or_none",
    "test_prompt_in_chunks",
    "test_rows_alone_and_as_one_batch",
    "test_whole_prompt",
]
