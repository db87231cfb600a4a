"""Make the labeled task of the demo and a classifier for it.

    python examples/demo/classifier.py FOLDER

The task ships with Python: from which part of the standard library is this docstring? FOLDER gets `train.csv`,
`test.csv` and `classifier`, the bundled sentence encoder with a head fitted to the first file.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import BertForSequenceClassification

import smelt

AREAS = {
    "asyncio": ["asyncio"],
    "debugging": ["bdb.py", "dis.py", "inspect.py", "pdb.py", "traceback.py"],
    "email": ["email", "imaplib.py", "mailbox.py", "poplib.py", "smtplib.py"],
    "files": ["os.py", "pathlib", "pathlib.py", "shutil.py", "tarfile.py", "tempfile.py", "zipfile", "zipfile.py"],
    "imports": ["importlib", "pkgutil.py", "runpy.py", "zipimport.py"],
    "numbers": ["_pydecimal.py", "fractions.py", "random.py", "statistics.py"],
    "processes": ["concurrent", "multiprocessing", "subprocess.py", "threading.py"],
    "unittest": ["doctest.py", "unittest"],
    "web": ["http", "socketserver.py", "urllib"],
    "xml": ["html", "xml"],
}
MIN_WORDS, MAX_TOKENS, TEST_SHARE = 6, 48, 0.3
STEPS, LEARNING_RATE, WEIGHT_DECAY = 200, 3e-3, 0.1


def docstrings(name: str) -> set[str]:
    """Return the first paragraphs of the docstrings in a module or package of the standard library."""
    path = Path(sysconfig.get_path("stdlib"), name)
    found = set()
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(" ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()))
    return {text for text in found if len(text.split()) >= MIN_WORDS}


def is_test(text: str) -> bool:
    """Assign a text to the test file by its hash, so that the split is the same everywhere."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < TEST_SHARE * 2**32


def write_task(folder: Path) -> list[tuple[str, str]]:
    """Write both files; return the rows of the first."""
    rows = sorted({(text, area) for area, names in AREAS.items() for name in names for text in docstrings(name)})
    train, test = [[row for row in rows if is_test(row[0]) == chosen] for chosen in (False, True)]
    for name, part in (("train.csv", train), ("test.csv", test)):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *part])
    return train


def fit(rows: list[tuple[str, str]]) -> tuple[BertForSequenceClassification, smelt.Model]:
    """Fit the pooler and a head on the frozen encoder."""
    torch.manual_seed(0)
    base, names = smelt.load("minilm-l6"), list(AREAS)
    config = base.network.config
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    network = BertForSequenceClassification(config).eval()
    network.bert.load_state_dict(base.network.state_dict(), strict=False)
    texts = base.tokenizer([text for text, _ in rows], padding=True, truncation=True, max_length=MAX_TOKENS)
    inputs = {name: torch.tensor(values) for name, values in texts.items()}
    labels = torch.tensor([names.index(area) for _, area in rows])
    with torch.no_grad():
        batches = zip(*(values.split(64) for values in inputs.values()), strict=True)
        hidden = torch.cat([network.bert(**dict(zip(inputs, batch, strict=True)))[0][:, :1] for batch in batches])
    head = [*network.bert.pooler.parameters(), *network.classifier.parameters()]
    optimizer = torch.optim.AdamW(head, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(network.classifier(network.bert.pooler(hidden)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return network, base


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = write_task(folder)
    network, base = fit(rows)
    network.save_pretrained(folder / "classifier")
    base.tokenizer.save_pretrained(folder / "classifier")
    print(f"A classifier of {len(AREAS)} parts of the standard library, fitted to {len(rows):,} docstrings.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
