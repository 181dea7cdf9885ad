"""What would happen? Virtual time, several servers, a router. Owns no policy: scheduler and memory are the real ones."""
