"""What ties scheduling and running together? The engine loop and process, its messages, and the offline ``LLM``."""
