"""One process that encodes pieces: `python -m training.token_cache.worker`, a line of JSON in, a line out.

The first line is the tokenizer and its back end; each other one a piece and the path that its ids go to (PATH.ids, and
PATH.lengths). It ends with its standard input, so it never outlives the one that has started it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np

from training.errors import JobError
from training.token_cache import documents, encoding, layout
from training.token_cache.documents import Piece
from training.token_cache.encoding import Encoder, TokenizerState


def encode_piece(encoder: Encoder, state: TokenizerState, piece: Piece, path: Path) -> tuple[int, int]:
    """Write the ids of a piece's documents and their lengths; return the number of documents and of ids."""
    lengths: list[layout.Array] = []
    kept = np.dtype(layout.CODES[state.type_code])
    total = 0
    with path.with_suffix(".ids").open("wb") as file:
        for texts in documents.read(piece):
            ids, counts = encoding.close_documents(*encoder.encode(texts), state.end)
            file.write(ids.astype(kept).tobytes())
            lengths.append(counts)
            total += len(ids)
    counted = np.concatenate(lengths) if lengths else np.zeros(0, "<i4")
    path.with_suffix(".lengths").write_bytes(counted.astype("<i4").tobytes())
    return len(counted), total


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer each request until there are no more; a fault is an answer too."""
    encoder: Encoder | None = None
    state: TokenizerState | None = None
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        try:
            if encoder is None or state is None:
                state = TokenizerState(**json.loads(Path(request["state"]).read_text(encoding="utf-8")))
                encoder = encoding.make(state, request["back_end"])
                answer: dict[str, Any] = {"ready": encoder.name}
            else:
                piece = Piece(**request["piece"])
                answer = {"done": encode_piece(encoder, state, piece, Path(request["path"]))}
        except JobError as error:
            answer = {"error": dataclasses.astuple(error)}
        except encoding.Differs as error:
            answer = {"differs": str(error)}
        except OSError as error:
            answer = {"error": [str(error), "a file could not be read or written", "look at the path and the disk"]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
