"""What would happen? Virtual time, several servers, a router. The scheduler and memory are the real ones."""
