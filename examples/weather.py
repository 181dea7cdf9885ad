"""A tool call from start to end: the model calls get_weather, this script answers, the model words the result."""

import json
import sys
from typing import Any

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000/v1", api_key="none")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather for a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
messages: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]


def ask() -> Any:
    done = client.chat.completions.create(model="nano", messages=messages, tools=TOOLS, temperature=0)
    message = done.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    print("thinks:", " ".join(getattr(message, "reasoning_content", "").split("\n")))
    return message


call = ask().tool_calls[0]
print("calls:", call.function.name, call.function.arguments)
weather = {"temperature": 21, "sky": "clear"}
messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(weather)})
print("answers:", ask().content)
