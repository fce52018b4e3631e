"""What `pagemill bench throughput`, `latency` and `serve` are made of.

Workloads are drawn from seeds, engines run them in a process of their own, load comes from processes that do nothing
else, and every measurement becomes one row. Nothing here imports a service; torch and transformers are imported by the
processes that measure, when they start.
"""
