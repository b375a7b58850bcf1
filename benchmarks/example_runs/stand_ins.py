"""Make random files in place of the models and data sets that examples read.

    python -m benchmarks.example_runs.stand_ins STORE [NAME TARGET]...

`NAME` is one of `MAKERS`, or of the models and data sets of `hub_content.py`.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy

Maker = Callable[[Path], None]
NUMBERS = numpy.random.default_rng(0)


def digits(target: Path, name: str = "MNIST") -> None:
    """Write 1,000 images of MNIST's size for each of training and test."""
    folder = target / name / "raw"
    folder.mkdir(parents=True)
    for split in ("train", "t10k"):
        images = NUMBERS.integers(0, 256, (1_000, 28, 28), dtype=numpy.uint8)
        labels = NUMBERS.integers(0, 10, 1_000, dtype=numpy.uint8)
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes((0, 0, 8, values.ndim))
            head += b"".join(size.to_bytes(4, "big") for size in values.shape)
            (folder / f"{split}-{kind}-ubyte").write_bytes(head + values.tobytes())


def _image(path: Path, width: int, height: int, mode: str = "RGB") -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    most = 256 if mode == "RGB" else 20
    values = NUMBERS.integers(0, most, shape, dtype=numpy.uint8)
    Image.fromarray(values).save(path)


def images(target: Path, splits: tuple[str, ...], count: int, size: int) -> None:
    """Write `count` square images in each of some folders."""
    for split in splits:
        for number in range(count):
            _image(target / split / f"{number:06}.jpg", size, size)


def image_folder(target: Path) -> None:
    """Write training and validation images of ImageNet's shape, in ten classes."""
    names = [f"{split}/class{n}" for split in ("train", "val") for n in range(10)]
    images(target, tuple(names), 40, 256)


def faces(target: Path) -> None:
    """Write 4,200 images of CelebA's size, all the same, with their attributes."""
    _image(target / "000000.jpg", 178, 218)
    for number in range(1, 4_200):
        (target / f"{number:06}.jpg").hardlink_to(target / "000000.jpg")
    names = ["Black_Hair", "Blond_Hair", "Brown_Hair", "Male", "Young"]
    rows = [f"{number:06}.jpg  1 -1 -1 1 -1" for number in range(4_200)]
    text = "\n".join(["4200", " ".join(names), *rows])
    (target / "attributes.txt").write_text(text + "\n")


def coco(target: Path) -> None:
    """Write images with boxes and masks, as COCO has them."""
    (target / "annotations").mkdir(parents=True)
    for split in ("train2017", "val2017"):
        rows, boxes = [], []
        for number in range(1, 41):
            name = f"{number:012}.jpg"
            _image(target / split / name, 640, 480)
            rows.append({"id": number, "file_name": name, "width": 640, "height": 480})
            for part in range(3):
                x, y = 40 + 100 * part, 60 + 50 * part
                corners = [x, y, x + 90, y, x + 90, y + 80, x, y + 80]
                boxes.append(
                    {
                        "id": 10 * number + part,
                        "image_id": number,
                        "category_id": 1 + part,
                        "bbox": [x, y, 90, 80],
                        "area": 7_200,
                        "iscrowd": 0,
                        "segmentation": [corners],
                    }
                )
        kinds = [{"id": number, "name": f"kind{number}"} for number in range(1, 91)]
        content = {"images": rows, "annotations": boxes, "categories": kinds}
        path = target / "annotations" / f"instances_{split}.json"
        path.write_text(json.dumps(content))


def voc(target: Path) -> None:
    """Write images with classes of pixels, as Pascal VOC 2012 has them."""
    folder = target / "VOCdevkit" / "VOC2012"
    names = [f"2012_{number:06}" for number in range(40)]
    for name in names:
        _image(folder / "JPEGImages" / f"{name}.jpg", 500, 375)
        _image(folder / "SegmentationClass" / f"{name}.png", 500, 375, "L")
    for split in ("train", "val", "trainval"):
        path = folder / "ImageSets" / "Segmentation" / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(names) + "\n")


def text(target: Path, lines: int = 20_000, words: int = 2_000) -> None:
    """Write lines of random words."""
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = NUMBERS.integers(0, words, (lines, 12))
    content = "\n".join(" ".join(f"w{word}" for word in row) for row in rows)
    # minGPT's sampler begins with these letters.
    target.write_text("O God, O God!\n" + content + "\n")


def wikitext(target: Path) -> None:
    """Write the three files of WikiText."""
    for split in ("train", "valid", "test"):
        text(target / f"{split}.txt", 4_000)


def tokens(target: Path) -> None:
    """Write tokens as nanoGPT's data sets have them."""
    NUMBERS.integers(0, 65, 2_000_000, dtype=numpy.uint16).tofile(target)


def citations(target: Path) -> None:
    """Write a graph of Cora's size for PyTorch Geometric's Planetoid."""
    from scipy.sparse import csr_matrix, random

    count, features, classes, tests = 2_708, 1_433, 7, 1_000
    folder = target / "raw"
    folder.mkdir(parents=True)
    values = csr_matrix(random(count, features, 0.0127, dtype=numpy.float32, rng=0))
    labels = numpy.eye(classes, dtype=numpy.int32)[NUMBERS.integers(0, classes, count)]
    trained = count - tests
    ends = NUMBERS.integers(0, count, (5_278, 2)).tolist()
    graph: dict[int, list[int]] = {number: [] for number in range(count)}
    for start, end in ends:
        graph[start].append(end)
        graph[end].append(start)
    parts = {
        "x": values[:140],
        "tx": values[trained:],
        "allx": values[:trained],
        "y": labels[:140],
        "ty": labels[trained:],
        "ally": labels[:trained],
        "graph": graph,
    }
    for name, part in parts.items():
        (folder / f"ind.cora.{name}").write_bytes(pickle.dumps(part, protocol=2))
    index = NUMBERS.permutation(numpy.arange(trained, count))
    (folder / "ind.cora.test.index").write_text("\n".join(map(str, index)) + "\n")


def cora_table(target: Path) -> None:
    """Write Cora as tables, as the examples without a library read it."""
    target.mkdir(parents=True)
    kinds = [
        "Case_Based",
        "Genetic_Algorithms",
        "Neural_Networks",
        "Probabilistic_Methods",
        "Reinforcement_Learning",
        "Rule_Learning",
        "Theory",
    ]
    bits = NUMBERS.integers(0, 2, (2_708, 1_433))
    rows = [
        "\t".join((str(number), *map(str, row), kinds[number % 7]))
        for number, row in enumerate(bits)
    ]
    ends = NUMBERS.integers(0, 2_708, (5_429, 2))
    (target / "cora.content").write_text("\n".join(rows) + "\n")
    text_of_ends = "\n".join(f"{start}\t{end}" for start, end in ends)
    (target / "cora.cites").write_text(text_of_ends + "\n")


def graphs(target: Path, labels: int = 3, graphs_count: int = 200) -> None:
    """Write graphs of 20 to 40 nodes for PyTorch Geometric's TUDataset."""
    folder, name = target / "raw", target.name
    folder.mkdir(parents=True)
    edges, owners, kinds, first = [], [], [], 1
    for graph in range(1, graphs_count + 1):
        size = int(NUMBERS.integers(20, 41))
        ends = NUMBERS.integers(first, first + size, (2 * size, 2))
        pairs = {(int(a), int(b)) for a, b in ends if a != b}
        edges += sorted(pairs | {(b, a) for a, b in pairs})
        owners += [graph] * size
        kinds += NUMBERS.integers(0, labels, size).tolist()
        first += size
    texts = {
        "A": [f"{a}, {b}" for a, b in edges],
        "graph_indicator": owners,
        "graph_labels": NUMBERS.integers(0, 2, graphs_count).tolist(),
        "node_labels": kinds,
    }
    for key, rows in texts.items():
        path = folder / f"{name}_{key}.txt"
        path.write_text("\n".join(map(str, rows)) + "\n")


def proteins(target: Path) -> None:
    """Write graphs with labels of nodes for PyTorch Geometric's PPI."""
    folder = target / "raw"
    folder.mkdir(parents=True)
    for split, count in (("train", 20), ("valid", 2), ("test", 2)):
        nodes = 500 * count
        ids = numpy.repeat(numpy.arange(1, count + 1), 500)
        ends = NUMBERS.integers(0, 500, (7_000 * count, 2))
        ends += 500 * numpy.repeat(numpy.arange(count), 7_000)[:, None]
        links = [{"source": int(a), "target": int(b)} for a, b in ends]
        content = {
            "directed": True,
            "multigraph": False,
            "graph": {},
            "nodes": [{"id": number} for number in range(nodes)],
            "links": links,
        }
        (folder / f"{split}_graph.json").write_text(json.dumps(content))
        features = NUMBERS.random((nodes, 50), dtype=numpy.float32)
        numpy.save(folder / f"{split}_feats.npy", features)
        labels = NUMBERS.integers(0, 2, (nodes, 121)).astype(numpy.float32)
        numpy.save(folder / f"{split}_labels.npy", labels)
        numpy.save(folder / f"{split}_graph_id.npy", ids)


def waves(target: Path) -> None:
    """Write the waves that `generate_sine_wave.py` writes."""
    import torch

    buffer = io.BytesIO()
    torch.save(NUMBERS.random((100, 1_000)), buffer)
    target.write_bytes(buffer.getvalue())


def vision_weights(target: Path) -> None:
    """Write the weights of a model of torchvision, named in the file's name."""
    import torch
    from torchvision import models

    target.parent.mkdir(parents=True, exist_ok=True)
    module = models.get_model(target.name.split("-")[0], weights=None)
    torch.save(module.state_dict(), target)


def timm_weights(target: Path) -> None:
    """Write the weights of a model of timm, as the hub's cache has them: the folder is
    named `models--timm--MODEL.TAG`."""
    import timm

    from tests.recipes import hub

    snapshot = target / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (target / "refs").mkdir()
    (target / "refs" / "main").write_text("0")
    name = target.name.rpartition("--")[2]
    module = timm.create_model(name.partition(".")[0], pretrained=False)
    tensors = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    hub.write_sparse_safetensors(snapshot / "model.safetensors", tensors)


def captioned(target: Path) -> None:
    """Write images with texts, as the image folders of data sets have them."""
    images(target, (".",), 40, 512)
    rows = [
        json.dumps({"file_name": f"{number:06}.jpg", "text": "a b c"})
        for number in range(40)
    ]
    (target / "metadata.jsonl").write_text("\n".join(rows) + "\n")


def pets(target: Path) -> None:
    """Write images whose names tell their class."""
    for kind in ("beagle", "pug", "sphynx"):
        for number in range(40):
            _image(target / f"{kind}_{number}.jpg", 300, 300)


def _words(count: int) -> list[str]:
    return [f"w{word}" for word in NUMBERS.integers(0, 400, count)]


def _row(kind: str, number: int) -> dict[str, Any]:
    context = _words(60)
    answer = {"text": [" ".join(context[:2])], "answer_start": [0]}
    rows: dict[str, dict[str, Any]] = {
        "pair": {
            "sentence1": " ".join(_words(20)),
            "sentence2": " ".join(_words(20)),
            "label": ("no", "yes")[number % 2],
        },
        "tagged": {"tokens": _words(20), "ner_tags": ["O", "B-PER", "I-PER", "O"] * 5},
        "question": {
            "id": str(number),
            "question": " ".join(_words(10)),
            "context": " ".join(context),
            "answers": answer,
        },
        "choice": {
            "sent1": " ".join(_words(12)),
            "sent2": " ".join(_words(3)),
            "label": number % 4,
        }
        | {f"ending{end}": " ".join(_words(8)) for end in range(4)},
        "summary": {"text": " ".join(_words(200)), "summary": " ".join(_words(30))},
        "translation": {
            "translation": {"en": " ".join(_words(20)), "ro": " ".join(_words(20))}
        },
    }
    return rows[kind]


def table_rows(target: Path, kind: str) -> None:
    """Write rows of a task as JSON lines; questions as SQuAD's scripts read them."""
    rows = [_row(kind, number) for number in range(400)]
    lines = [{"data": rows}] if kind == "question" else rows
    target.write_text("\n".join(map(json.dumps, lines)) + "\n")


def sentence_rules(target: Path) -> None:
    """Write NLTK's rules for the ends of English sentences, without exceptions."""
    (target / "punkt").mkdir(parents=True)
    folder = target / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("abbrev_types", "collocations", "ortho_context", "sent_starters"):
        ending = "txt" if name in ("abbrev_types", "sent_starters") else "tab"
        (folder / f"{name}.{ending}").write_text("")


KINDS_OF_ROWS = ("pair", "tagged", "question", "choice", "summary", "translation")
MAKERS: dict[str, Maker] = {
    "captioned": captioned,
    "sentence-rules": sentence_rules,
    "pets": pets,
    **{f"{kind}-rows": partial(table_rows, kind=kind) for kind in KINDS_OF_ROWS},
    "digits": digits,
    "clothes": lambda target: digits(target, "FashionMNIST"),
    "image-folder": image_folder,
    "pairs": lambda target: images(target, ("train", "val", "test"), 60, 256),
    "wide-pairs": lambda target: _wide(target),
    "domains": lambda target: images(
        target, ("train/A", "train/B", "test/A", "test/B"), 40, 256
    ),
    "photos": lambda target: images(target, (".",), 60, 512),
    "photo": lambda target: _image(target, 512, 512),
    "two-splits": lambda target: images(
        target, ("images/train", "images/test"), 100, 321
    ),
    "faces": faces,
    "coco": coco,
    "voc": voc,
    "text": text,
    "wikitext": wikitext,
    "tokens": tokens,
    "citations": citations,
    "cora-table": cora_table,
    "graphs": graphs,
    "proteins": proteins,
    "waves": waves,
    "vision-weights": vision_weights,
    "timm-weights": timm_weights,
}


def _wide(target: Path) -> None:
    """Write images that consist of two beside each other."""
    for split in ("train", "val", "test"):
        for number in range(60):
            _image(target / split / f"{number}.jpg", 512, 256)


def let_torchvision_load() -> None:
    """Declare what torchvision misses beside a torch that it was not built for."""
    import torch

    sys.modules["torchvision._meta_registrations"] = ModuleType("none")
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float threshold) -> Tensor")


def make(name: str, target: Path, store: Path) -> None:
    """Make a stand-in, whole or not at all; content of the hub is a link to the one
    that is in a store."""
    if target.exists():
        return
    target.unlink(missing_ok=True)  # a link to a store that was emptied
    target.parent.mkdir(parents=True, exist_ok=True)
    if name in MAKERS:
        _make_whole(MAKERS[name], target)
        return
    from benchmarks.example_runs import hub_content

    stored = store / name
    if not stored.exists():
        _make_whole(partial(hub_content.make, name), stored)
    target.symlink_to(stored)


def _make_whole(maker: Maker, target: Path) -> None:
    # Makers write names of their folder into files.
    unfinished = target.parent / ".unfinished" / target.name
    shutil.rmtree(unfinished.parent, ignore_errors=True)
    unfinished.parent.mkdir(parents=True)
    maker(unfinished)
    unfinished.rename(target)
    unfinished.parent.rmdir()


def main(store: Path, *names: str) -> None:
    """Make stand-ins: a name and its target each."""
    let_torchvision_load()
    for name, target in zip(names[::2], names[1::2], strict=True):
        try:
            make(name, Path(target), store)
        except Exception:
            traceback.print_exc()
            print(f"not made: {name}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
