"""The documentation's tables, made from what the code does: ``python -m k3stack.server.reference docs/*.md``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from k3stack.config.flags import markdown_aliases, markdown_table
from k3stack.server.engine_metrics import markdown_metrics, markdown_not_offered
from k3stack.server.fields import (
    CHAT_RULES,
    COMPLETION_RULES,
    ChatRequest,
    CompletionRequest,
    rules_table,
)
from k3stack.server.messages_convert import MESSAGES_RULES, MessagesRequest
from k3stack.server.native_fields import GENERATE_RULES, NATIVE_SAMPLING_RULES, GenerateRequest, NativeSampling

_MARK = re.compile(r"(<!-- table: ([a-z ]+) -->\n)(?:\n?\|.*\n(?:\|.*\n)*)?")


def tables() -> dict[str, str]:
    """Each table by the name that the document calls it by."""
    return {
        "options": markdown_table(),
        "aliases": markdown_aliases(),
        "chat fields": rules_table(ChatRequest, CHAT_RULES),
        "messages fields": rules_table(MessagesRequest, MESSAGES_RULES),
        "generate fields": rules_table(GenerateRequest, GENERATE_RULES),
        "sampling params": rules_table(NativeSampling, NATIVE_SAMPLING_RULES),
        "engine metrics": markdown_metrics(),
        "numbers not offered": markdown_not_offered(),
        "completion fields": rules_table(CompletionRequest, COMPLETION_RULES),
    }


def fill(text: str) -> str:
    """``text`` with every marked table as it must be."""
    found = tables()
    return _MARK.sub(lambda mark: f"{mark.group(1)}\n{found[mark.group(2)]}\n", text)


def main() -> None:
    """Rewrite the files named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(fill(path.read_text()))


if __name__ == "__main__":
    main()
