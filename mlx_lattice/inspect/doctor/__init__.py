"""The doctor: proves and times this machine's kernels, beside what was predicted."""
