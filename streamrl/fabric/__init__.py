"""Moves weight versions between GPUs of one fabric by NCCL: one process a member, which may be killed at any time.

An NCCL call whose peer is gone never returns, and nothing but the end of its process ends it. So no service and no
engine makes one: each member of a group has a process of its own (`member_process.py`), which its owner asks with a
deadline (`member.py`) and kills when that passes. What arrives lands in host memory, is compared with its digests there
and loaded as any other version; whoever was not served takes the ordinary way.

Not tested on hardware: `nccl.py` alone needs GPUs, everything else runs in tests over a communicator of their own.
"""
