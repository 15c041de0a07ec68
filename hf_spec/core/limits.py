"""Upper bounds on sizes that options, configs and files request, checked before allocation.

They are far above useful values: anything beyond them is a mistake or a malicious file.
"""

#: Draft tokens of a tree requested by an option or a file.
MAX_DRAFT_TOKENS = 1024
#: Tokens of earlier answers that are kept for lookups.
MAX_HISTORY = 2**24
#: Nodes of any tree, with room for lookup draft tokens merged into another tree.
MAX_NODES = 2 * MAX_DRAFT_TOKENS
#: Step tokens per batch row: nodes and the probes under them.
MAX_ROWS = 4096
#: Future tokens that an adapter predicts: mask tokens, prompt tokens, or heads.
MAX_FUTURE = 256
#: Probes under a node.
MAX_PROBES = 1024
#: Learned tokens before a sequence.
MAX_PREFIX_KV = 4096
#: Residual blocks of a head.
MAX_BLOCKS = 64
#: Rank and alpha of low-rank updates.
MAX_RANK, MAX_ALPHA = 16384, 1e6
#: Layers, heads and dimensions of a base model; batch sizes, context lengths and threads.
MAX_SHAPE, MAX_SIZE = 65536, 2**31
