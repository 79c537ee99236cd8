"""Retrieval on images and captions: ranks, intervals, manifests that are wrong."""

from pathlib import Path

import pytest
import torch

from mmplan.errors import InputError
from mmplan.runtime.health.alignment import compare_alignment, encode, measure_alignment
from mmplan.runtime.health.captions import CaptionSet, read_captions


def pairs(count: int, each: int = 1) -> CaptionSet:
    return CaptionSet(
        images=tuple(Path(f"{i}.jpg") for i in range(count)),
        captions=tuple(f"caption {i} {j}" for i in range(count) for j in range(each)),
        pairs=tuple((i, i * each + j) for i in range(count) for j in range(each)),
    )


def rows(count: int, seed: int, width: int = 32) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def test_equal_embeddings_of_pairs_are_found_and_one_for_all_finds_nothing() -> None:
    images = rows(40, 0)
    found = measure_alignment(images, images.repeat_interleave(2, 0), pairs(40, 2)).quantities
    assert found["alignment error"].value == 0.0 and found["stability"].value > 0.99
    collapsed = measure_alignment(torch.ones(40, 8), torch.ones(80, 8), pairs(40, 2)).quantities
    assert collapsed["image to text recall@10"].value == 0.0 and collapsed["alignment error"].value == 1.0


def test_recalls_of_three_images_by_hand() -> None:
    # Image 0 is nearest to caption 1 and then 0; image 1 to its own; image 2 to 0, then 1, then 2.
    images = torch.tensor([[1.0, 0.9], [0.0, 1.0], [1.0, 0.0]])
    texts = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.1]])
    found = measure_alignment(images, texts, pairs(3))
    assert found.per_image["image to text recall@1"].tolist() == [0.0, 1.0, 0.0]
    assert found.per_image["image to text recall@5"].tolist() == [1.0, 1.0, 1.0]
    # Captions 0, 1 and 2 are nearest to images 2, 0 and 1.
    assert found.per_image["text to image recall@1"].tolist() == [0.0, 0.0, 0.0]


def test_a_caption_of_two_images_counts_for_both() -> None:
    data = CaptionSet(images=(Path("a"), Path("b")), captions=("same",), pairs=((0, 0), (1, 0)))
    found = measure_alignment(rows(2, 0), rows(1, 1), data)
    assert found.per_image["image to text recall@1"].tolist() == [1.0, 1.0]
    assert found.per_image["text to image recall@1"].tolist() == [1.0, 1.0]


def test_the_interval_of_the_bootstrap_covers_the_mean_in_95_of_100_draws() -> None:
    """Hits of independent images with a known chance; 200 draws, 0.95 +- 3 standard errors."""
    covered = 0
    for seed in range(200):
        hits = (torch.rand(150, generator=torch.Generator().manual_seed(seed)) < 0.6).float()
        from mmplan.runtime.health import alignment

        interval = alignment._interval(hits, alignment._picks(150, seed)[:300])
        covered += interval.least <= 0.6 <= interval.most
    assert covered / 200 >= 0.95 - 3 * (0.05 * 0.95 / 200) ** 0.5


def test_a_worse_encoder_is_told_and_the_same_one_is_not() -> None:
    images = rows(300, 0)
    good = measure_alignment(images, images + 1.0 * rows(300, 1), pairs(300))
    again = measure_alignment(images, images + 1.0 * rows(300, 1), pairs(300))
    bad = measure_alignment(images, images + 2.0 * rows(300, 1), pairs(300))
    assert compare_alignment(bad, good).worse
    assert not compare_alignment(good, again).worse and not compare_alignment(good, bad).worse


def test_embeddings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"40 captions became embeddings of shape \(39, 32\)"):
        measure_alignment(rows(40, 0), rows(39, 1), pairs(40))
    with pytest.raises(InputError, match="Inf or NaN"):
        measure_alignment(rows(40, 0) / 0, rows(40, 1), pairs(40))
    with pytest.raises(InputError, match="32 numbers, caption embeddings 16"):
        measure_alignment(rows(40, 0), rows(40, 1, 16), pairs(40))


def test_an_encoder_that_fails_is_named_with_the_image() -> None:
    def broken(items: object) -> torch.Tensor:
        raise OSError("truncated file")

    with pytest.raises(InputError, match=r"encoding of '0.jpg' and the next failed: OSError: truncated file"):
        encode(pairs(3), broken, broken)


JSONL = '{"image": "a.jpg", "captions": ["a dog", "a brown dog"]}\n\n{"image": "b.jpg", "caption": "a cat"}\n'
CSV = 'image,caption\na.jpg,a dog\na.jpg,"a brown, old dog"\nb.jpg,a cat\n'


def write(folder: Path, name: str, text: str) -> Path:
    for image in ("a.jpg", "b.jpg"):
        (folder / image).write_bytes(b"image")
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("name", "text"), [("m.jsonl", JSONL), ("m.csv", CSV), ("m.tsv", "file_name\ttext\na.jpg\tx\na.jpg\ty\nb.jpg\tz")]
)
def test_manifests_are_read(name: str, text: str, tmp_path: Path) -> None:
    found = read_captions(write(tmp_path, name, text))
    assert [image.name for image in found.images] == ["a.jpg", "b.jpg"]
    assert found.pairs == ((0, 0), (0, 1), (1, 2)) and len(found.captions) == 3


def test_a_limit_takes_the_first_images(tmp_path: Path) -> None:
    file = write(tmp_path, "m.csv", CSV + "missing.jpg,far away\n")
    assert len(read_captions(file, 2).images) == 2


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("m.jsonl", JSONL + '{"image": "c.jpg", "caption": "x"}', "m.jsonl:4: there is no image 'c.jpg'"),
        ("m.csv", CSV + "b.jpg,a cat\n", "m.csv:5: the caption 'a cat' of 'b.jpg' stands in line 4 too"),
        ("m.csv", "image,caption\na.jpg,\n", "m.csv:2: caption: expected a caption, found ''"),
        ("m.jsonl", '{"image": "a.jpg", "captions": []}', "m.jsonl:1: captions: expected at least one caption"),
        ("m.jsonl", '{"image": ["a.jpg"], "caption": "x"}', "m.jsonl:1: image: expected the path of an image, found"),
        ("m.jsonl", '{"image": "a.jpg"}', "m.jsonl:1: expected one of the keys"),
        ("m.jsonl", '{"image": "a.jpg", "caption": "x", "text": "y"}', "found 'caption', 'text'"),
        ("m.jsonl", "[1]", "m.jsonl:1: expected a JSON object"),
        ("m.jsonl", "{", "m.jsonl:1: expected a JSON object on this line"),
        ("m.jsonl", '{"image": "a.jpg", "caption": "x"}', "retrieval needs at least 2 images, the manifest has 1"),
        ("m.jsonl", "", "retrieval needs at least 2 images, the manifest has 0"),
        ("m.parquet", "", "expected a manifest that ends in"),
        ("m.csv", "image,caption\na.jpg\n", "m.csv:2: expected 2 cells"),
        ("m.jsonl", '{"image": "a\\u0000.jpg", "caption": "x"}', "expected the path of an image"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_one_sentence(name: str, text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_captions(write(tmp_path, name, text))
    assert told in str(caught.value) and "\n" not in str(caught.value)
