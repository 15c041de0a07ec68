"""Tree forwards with hand-made masks, and plain forwards of every path alone as their oracle."""

import torch
from transformers import DynamicCache

from modeling_patches.cache_name import CACHE

#      0        a path of three, siblings at each level,
#     / \       nodes not in depth-first order
#    1   2
#   / \   \
#  3   4   5
#  |
#  6
PARENTS = [-1, 0, 0, 1, 1, 2, 3]
STALE = 10**6  # position of slots that nobody attends


def random_tokens(*shape, seed):
    return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))


def padded_prompt():
    """Two prompts of 9 and 5 tokens, left-padded: ids, 2-D mask, positions, all (2, 9)."""
    ids, mask = random_tokens(2, 9, seed=1), torch.ones(2, 9, dtype=torch.long)
    ids[1, :4], mask[1, :4] = 0, 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def path_to(node):
    return [*path_to(PARENTS[node]), node] if node >= 0 else []


def additive(visible, dtype=torch.float32):
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


class Decoding:
    """Prompts in a cache, tree after tree behind them; rejected nodes stay as unseen slots."""

    def __init__(self, model):
        self.model, self.cache = model, DynamicCache()
        ids, mask, self.positions = padded_prompt()
        self.seen = mask.bool()  # (batch, slots)
        self.rows = [row[keep].tolist() for row, keep in zip(ids, self.seen)]
        self.prefill = self.forward(ids, mask, self.positions)

    @torch.no_grad()
    def forward(self, ids, mask, positions):
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            **{CACHE: self.cache},
            use_cache=True,
        ).logits

    def tree(self, tokens, set_positions):
        """Logits (batch, nodes, vocab) of one forward over a tree behind each row."""
        depths = torch.tensor([len(path_to(node)) - 1 for node in range(len(PARENTS))])
        lengths = torch.tensor([len(row) for row in self.rows])
        ancestors = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
        for node in range(len(PARENTS)):
            ancestors[node, path_to(node)] = True

        queries = lengths[:, None] + depths
        visible = torch.cat(
            [
                self.seen[:, None].expand(-1, len(PARENTS), -1),
                ancestors.expand(len(self.rows), -1, -1),
            ],
            dim=-1,
        )
        keys = torch.cat([self.positions.masked_fill(~self.seen, STALE), queries], dim=-1)
        set_positions(queries, keys)
        self.positions = keys
        return self.forward(tokens, additive(visible[:, None]), queries)

    def accept(self, tokens, paths):
        kept = torch.zeros(len(self.rows), len(PARENTS), dtype=torch.bool)
        for row, path in enumerate(paths):
            kept[row, path] = True
        self.seen = torch.cat([self.seen, kept], dim=-1)
        self.rows = [
            row + tokens[i, path].tolist() for i, (row, path) in enumerate(zip(self.rows, paths))
        ]


@torch.no_grad()
def expected(model, rows, tokens):
    """The oracle: every path of the tree as a sequence of its own, no cache, mask or padding."""
    return torch.stack(
        [
            torch.stack(
                [
                    model(torch.tensor([row + tokens[i, path_to(node)].tolist()])).logits[0, -1]
                    for node in range(len(PARENTS))
                ]
            )
            for i, row in enumerate(rows)
        ]
    )


def assert_same(got, want):
    # fp32: sums over 20 keys and 48 channels in another order; logits are of the order of 10.
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert torch.equal(got.argmax(-1), want.argmax(-1))
