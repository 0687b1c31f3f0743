"""What the machine really offers: cores, memory, instruction sets and software. Torch-free.

Every probe tolerates another operating system or a missing file: it returns None, or nothing, for what it can't know.
Probes that read the kernel's files take ``root``, the folder that stands for ``/``.
"""
