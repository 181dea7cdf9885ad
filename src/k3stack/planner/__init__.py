"""What should I run? Reads operators' commands, says what they will do, and searches layouts."""
