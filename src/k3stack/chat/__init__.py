"""What do the words mean? Tokenizer, Kimi-K3's prompt format, the output parser.

``docs/chat-format.md`` describes the format for users of the API.
"""

from k3stack.chat.calls import ToolCallIds, usage
from k3stack.chat.deltas import (
    Collector,
    Content,
    Delta,
    Parsed,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallDropped,
    ToolCallEnd,
    ToolCallStart,
)
from k3stack.chat.parser import OutputParser, StreamingTextParser, parse_ids, parse_output
from k3stack.chat.prompt import encode, flat, render, starts_in_think
from k3stack.chat.segments import Segment
from k3stack.chat.settings import parse_response_format, parse_thinking, parse_tool_choice
from k3stack.chat.tokenizer import Detokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Collector",
    "Content",
    "Delta",
    "Detokenizer",
    "OutputParser",
    "Parsed",
    "Reasoning",
    "Segment",
    "StreamingTextParser",
    "Tokenizer",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallDropped",
    "ToolCallEnd",
    "ToolCallIds",
    "ToolCallStart",
    "encode",
    "flat",
    "load_tokenizer",
    "parse_ids",
    "parse_output",
    "parse_response_format",
    "parse_thinking",
    "parse_tool_choice",
    "render",
    "starts_in_think",
    "usage",
]
