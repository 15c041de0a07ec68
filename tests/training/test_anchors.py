"""Examples and batches of training."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerState

from hf_spec.tools.training.dataset import (
    AnswerDataset,
    NewAnchors,
    SimilarLengths,
    answers_of,
    collate,
)

ROWS = [
    {"prompt_ids": list(range(100, 104)), "answer_ids": list(range(10, 40))},
    {"prompt_ids": [100], "answer_ids": [10, 11, 12, 13]},
    {"prompt_ids": [100, 101], "answer_ids": [10]},  # too short to ask for anything
]


def test_anchors_lie_where_there_is_something_to_predict():
    data = AnswerDataset(ROWS, num_anchors=6)
    for index, row in enumerate(ROWS):
        example = data[index]
        prompt = len(row["prompt_ids"])
        assert example["input_ids"].tolist() == row["prompt_ids"] + row["answer_ids"]
        assert example["labels"].tolist() == [-100] * prompt + row["answer_ids"]
        anchors = example["anchors"].tolist()
        assert anchors == sorted(set(anchors)) and len(anchors) <= 6
        # The token behind an anchor is certain, the one after it is asked for: both in the answer.
        assert all(prompt - 1 <= at <= len(example["input_ids"]) - 3 for at in anchors)
    assert data[1]["anchors"].tolist() == [0, 1, 2] and data[2]["anchors"].tolist() == []
    cut = AnswerDataset(ROWS, num_anchors=50, max_length=9)[0]
    assert len(cut["input_ids"]) == 9 and cut["anchors"].tolist() == [3, 4, 5, 6]
    with pytest.raises(ValueError, match="num_anchors=0"):
        AnswerDataset(ROWS, num_anchors=0)


def test_anchors_lie_in_all_answers_of_a_chat():
    """The prompt holds two: tokens 2 to 4, and 7, after which there is nothing to ask for."""
    row = {"prompt_ids": list(range(100, 110)), "answer_ids": [10, 11, 12]}
    row["earlier_answers"] = [[2, 5], [7, 8]]
    example = AnswerDataset([row])[0]
    ids, learned = example["input_ids"].tolist(), {2, 3, 4, 7, 10, 11, 12}
    assert ids == row["prompt_ids"] + row["answer_ids"]
    assert example["labels"].tolist() == [
        token if place in learned else -100 for place, token in enumerate(ids)
    ]
    assert example["anchors"].tolist() == [1, 2, 9, 10]
    assert AnswerDataset([row], max_length=4)[0]["labels"].tolist() == [-100, -100, 102, 103]
    assert [*answers_of([row])] == [[102, 103, 104], [107], [10, 11, 12]]


def test_anchors_depend_on_seed_epoch_and_row_alone():
    one, two = (AnswerDataset(ROWS, num_anchors=6, seed=3) for _ in range(2))
    first = one[0]["anchors"].tolist()
    two[1], two[2]
    assert two[0]["anchors"].tolist() == first
    loader = DataLoader(two)
    NewAnchors().on_epoch_begin(None, TrainerState(epoch=1.0), None, train_dataloader=loader)
    assert two.epoch == 1 and two[0]["anchors"].tolist() != first
    two.set_epoch(0)
    assert two[0]["anchors"].tolist() == first
    assert AnswerDataset(ROWS, num_anchors=6, seed=4)[0]["anchors"].tolist() != first
    even = AnswerDataset(ROWS, num_anchors=6, seed=4, random=False)
    assert even[0]["anchors"].tolist() == [3, 7, 12, 17, 22, 27]
    even.set_epoch(5)
    assert even[0]["anchors"].tolist() == [3, 7, 12, 17, 22, 27]


def test_workers_that_stay_draw_other_anchors_in_each_epoch():
    data, alone = (AnswerDataset(ROWS, num_anchors=6, seed=3) for _ in range(2))
    loader = DataLoader(data, batch_size=None, num_workers=1, persistent_workers=True)
    for epoch in (0, 1):
        for dataset in (data, alone):
            dataset.set_epoch(epoch)
        found = [example["anchors"].tolist() for example in loader]
        assert found == [alone[index]["anchors"].tolist() for index in range(len(alone))]


@pytest.mark.parametrize("random", [True, False])
def test_data_are_on_the_cpu_whatever_the_default_device(random):
    data = AnswerDataset(ROWS, num_anchors=6, random=random)
    expected = collate([data[0], data[1]])
    with torch.device("meta"):  # tensors without data
        found = collate([data[0], data[1]])
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


def test_batches_of_similar_length():
    """Each example once per epoch, in an order that seed and epoch alone decide."""
    counts = [1 + (7 * n) % 64 for n in range(64)]
    rows = [{"prompt_ids": [100], "answer_ids": [10] * count} for count in counts]
    data = AnswerDataset(rows, max_length=50, seed=3)
    sampler = SimilarLengths(4, data)
    first = list(sampler)
    assert sorted(first) == list(range(64)) and list(sampler) == first
    assert list(SimilarLengths(4, AnswerDataset(rows, max_length=50, seed=3))) == first
    assert list(SimilarLengths(4, AnswerDataset(rows, max_length=50, seed=4))) != first
    batches = [[min(counts[n] + 1, 50) for n in first[at : at + 4]] for at in range(0, 64, 4)]
    # Random batches: about 30.
    assert sum(max(batch) - min(batch) for batch in batches) / len(batches) < 15
    data.set_epoch(1)
    second = list(sampler)
    assert second != first and sorted(second) == sorted(first)


def test_collate_pads_on_the_right():
    data = AnswerDataset(ROWS, num_anchors=4)
    batch = collate([data[0], data[1], data[2]])
    assert batch["input_ids"].shape == (3, 34) and batch["anchors"].shape == (3, 4)
    assert batch["attention_mask"].sum(1).tolist() == [34, 5, 3]
    assert batch["labels"][1].tolist() == [-100, 10, 11, 12, 13] + [-100] * 29
    # Padding anchors hang under the last token, behind which there is nothing to predict.
    assert batch["anchors"][1].tolist() == [0, 1, 2, 4]
    assert batch["anchors"][2].tolist() == [2, 2, 2, 2]
