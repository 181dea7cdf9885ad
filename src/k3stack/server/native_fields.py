"""Bodies of SGLang's native endpoints."""

from __future__ import annotations

import msgspec

from k3stack.errors import UserError
from k3stack.server.fields import FieldRules, Fixed, Json, Priority, Seconds, Whole, convert


class NativeSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params``: SGLang's names for what SamplingParams holds."""

    max_new_tokens: Whole = 128
    """0: only the prompt is looked at."""
    min_new_tokens: Whole = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = msgspec.field(default_factory=dict)
    sampling_seed: int | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    n: Whole = 1
    skip_special_tokens: bool = True
    json_schema: str | None = None
    """Text of a JSON schema."""
    regex: str | None = None
    ebnf: str | None = None

    @property
    def seed(self) -> int | None:
        return self.sampling_seed

    @property
    def min_tokens(self) -> int:
        return self.min_new_tokens if self.max_new_tokens else 0


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /generate."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Json | list[Json] = msgspec.field(default_factory=dict)
    stream: bool = False
    rid: str | list[str] | None = None
    return_logprob: bool = False
    logprob_start_len: Whole = -1
    """Where the prompt's log-probabilities begin; -1: none of the prompt's."""
    top_logprobs_num: Whole = 0
    return_text_in_logprobs: bool = False
    priority: Priority = 0
    target_ttft_s: Seconds | None = None
    target_tpot_ms: Seconds | None = None


GENERATE_RULES = FieldRules(
    fixed={
        "model": Fixed((), "this server has one model: leave it out"),
        "log_metrics": Fixed((True,), "finished requests are always counted"),
        "return_hidden_states": Fixed((False,), "hidden states are not returned"),
        "return_routed_experts": Fixed((False,), "the router's choices are not returned"),
        "return_entropy": Fixed((False,), "use top_logprobs_num"),
        "require_reasoning": Fixed((False,), "use /v1/chat/completions"),
        "data_parallel_rank": Fixed((0,), "this server has one rank"),
        "routed_dp_rank": Fixed((0,), "this server has one rank"),
        "background": Fixed((False,), "wait for the answer"),
        "lora_path": Fixed((), "adapters are not served"),
        "session_params": Fixed((), "send the whole prompt: its beginning is reused"),
        "bootstrap_host": Fixed((), "this server does prefill and decoding itself"),
        "bootstrap_port": Fixed((), "this server does prefill and decoding itself"),
        "bootstrap_room": Fixed((), "this server does prefill and decoding itself"),
        "custom_logit_processor": Fixed((), "code is not taken from requests; use logit_bias"),
        "extra_key": Fixed((), "every client shares one prefix cache"),
        "token_ids_logprob": Fixed((), "use top_logprobs_num"),
    },
    refused={
        "input_embeds": "only text and ids are read",
        "image_data": "images are not read",
        "video_data": "videos are not read",
        "audio_data": "sound is not read",
        "modalities": "only text is read",
        "prompt": "the field is called text",
        "messages": "use /v1/chat/completions",
    },
)

NATIVE_SAMPLING_RULES = FieldRules(
    fixed={
        "spaces_between_special_tokens": Fixed((False, True), "control tokens are written by name, without blanks"),
        "no_stop_trim": Fixed((False,), "a matched stop string is not part of the text"),
        "stream_interval": Fixed((1,), "every token is streamed as it comes"),
        "custom_params": Fixed((), "code is not taken from requests"),
        "stop_regex": Fixed((), "use stop"),
        "structural_tag": Fixed((), "use /v1/chat/completions with tools"),
    },
    refused={"max_tokens": "the field is called max_new_tokens", "seed": "the field is called sampling_seed"},
)


def sampling_fields(raw: Json) -> NativeSampling:
    """``sampling_params`` checked. Raises UserError whose ``param`` has the whole path."""
    try:
        found = convert(raw, NativeSampling, NATIVE_SAMPLING_RULES)
    except UserError as e:
        raise UserError(f"sampling_params: {e}", param=f"sampling_params.{e.param}" if e.param else None) from None
    if found.max_new_tokens < 0:
        raise UserError(
            f"sampling_params.max_new_tokens is {found.max_new_tokens}; it must be 0 or more",
            param="sampling_params.max_new_tokens",
        )
    return found


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /abort_request."""

    rid: str | None = None
    abort_all: bool = False


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /tokenize: a text, several, or a conversation with what shapes its prompt."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    response_format: Json | None = None
    reasoning_effort: str | None = None
    reasoning: Json | None = None
    thinking: bool | Json | None = None
    chat_template_kwargs: Json | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /detokenize: ids, or lists of ids."""

    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool = False


TOKENIZE_RULES = FieldRules(
    fixed={
        "add_special_tokens": Fixed((True, False), "nothing is added to a prompt"),
        "add_generation_prompt": Fixed((True,), "use continue_final_message to go on with the last message"),
    },
    refused={"text": "the field is called prompt"},
)
DETOKENIZE_RULES = FieldRules(fixed={}, refused={"ids": "the field is called tokens"})
