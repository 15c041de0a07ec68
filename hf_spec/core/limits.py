"""How large what options, configs and files ask for may be: checked before anything is allocated.

Far above what pays; what is beyond is a mistake, or a file that means harm.
"""

#: Candidates of a tree that is asked for: by an option, or by a file.
MAX_CANDIDATES = 1024
#: Nodes of any tree, with room for the look-ups that are merged into another one.
MAX_NODES = 2 * MAX_CANDIDATES
#: Rows of a step: nodes, and probes under them.
MAX_ROWS = 4096
#: Future tokens that an adapter predicts: mask tokens, prompt tokens, or heads.
MAX_FUTURE = 256
#: Probes under a node.
MAX_PROBES = 1024
#: Learned tokens in front of a sequence.
MAX_FRONT = 4096
#: Residual blocks of a head.
MAX_BLOCKS = 64
#: Rank of low-rank updates, and their alpha.
MAX_RANK, MAX_ALPHA = 16384, 1e6
#: Layers, heads and dimensions of a base model; batch sizes, context lengths and threads.
MAX_SHAPE, MAX_SIZE = 65536, 2**31
#: Seconds of a step.
MAX_SECONDS = 1e6
#: Bytes of a JSON file; and of tensors that share their numbers, in sizes of their file.
MAX_JSON, MAX_SHARED = 2**26, 16
