"""What runs next? Queues, admission, step policies, preemption, abort, drain; and the seams they run against."""
