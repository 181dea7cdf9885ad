"""Training of K3-nano. Not part of the installed package; see README.md beside this file."""
