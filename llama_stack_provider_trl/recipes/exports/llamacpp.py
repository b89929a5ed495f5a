"""Reads a GGUF file by llama.cpp, which the package xllamacpp runs on the CPU in this process.

Its server listens on a socket in a directory of this user, so that no other user of the machine can ask it.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import importlib.util
import json
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ...specs.exports import GGUF_FILE
from ...specs.rows import Message
from ..model.saving import describe
from .gguf_file import metadata
from .proof import AnsweredToken, failed
from .readers import stop_tokens

PACKAGE = "xllamacpp"
_TOP = 200
"""Likeliest tokens that are compared at each place."""
_TIMEOUT = 600.0
"""Seconds that the server may take for a token."""
_BIAS = 1e6
"""Added to the logit of a token that is to be chosen."""
_BOS = "tokenizer.ggml.bos_token_id"


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


class LlamaCppReader:
    """A GGUF file that llama.cpp has loaded. `close` ends it. Raises JobFailure: export_failed, it cannot be loaded.

    Args:
        context: tokens of a prompt with its answer.
        adapters: GGUF files of adapters that are added to the model.
    """

    def __init__(self, directory: Path, context: int, threads: int, adapters: Sequence[Path] = ()) -> None:
        import xllamacpp

        self.name = f"llama.cpp by {PACKAGE} {importlib.metadata.version(PACKAGE)}"
        self._ends = stop_tokens(directory / GGUF_FILE)
        self._metadata = metadata(directory / GGUF_FILE)
        self._scratch = Path(mkdtemp(prefix="llamacpp-"))
        self._socket = self._scratch / "server.sock"
        self.scales = [1.0] * len(adapters)
        """Of the adapters, in each request from now on. 0: it is not added."""
        params = xllamacpp.CommonParams()
        params.model.path = str(directory / GGUF_FILE)
        if adapters:
            params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(path), 1.0) for path in adapters]
        params.hostnames = [str(self._socket)]
        params.n_ctx = context
        params.n_parallel = 1
        params.use_jinja = params.swa_full = True
        params.warmup = params.fit_params = params.ui = False
        params.verbosity = 0
        params.cache_ram_mib = 0  # that cache gives what was computed with one adapter to a request with another
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        try:
            self._server: Any = xllamacpp.Server(params)
        except RuntimeError as error:
            self.close()
            raise failed(f"{self.name} cannot load it: {error}") from error

    def close(self) -> None:
        self._server = None
        shutil.rmtree(self._scratch, ignore_errors=True)

    def rendered(self, messages: list[Message]) -> str:
        if "tokenizer.chat_template" not in self._metadata:
            raise failed("it has no chat template")
        text: str = self._ask("/apply-template", {"messages": messages})["prompt"]
        # llama.cpp leaves out the token that it writes before every prompt by itself.
        if self._metadata.get("tokenizer.ggml.add_bos_token") and _BOS in self._metadata:
            bos = self._ask("/detokenize", {"tokens": [self._metadata[_BOS]]})["content"]
            return text if text.startswith(bos) else bos + text
        return text

    def tokens(self, text: str, *, is_rendered: bool) -> list[int]:
        asked = {"content": text, "add_special": not is_rendered, "parse_special": True}
        return [int(token) for token in self._ask("/tokenize", asked)["tokens"]]

    def ends(self) -> list[int]:
        for end in self._ends:
            if self._complete([end], 2, logit_bias=[[end, _BIAS]])["stop_type"] != "eos":
                raise failed(f"{self.name} does not end an answer at token {end}, which the file names as its end")
        return self._ends

    def answer(self, ids: list[int], most: int) -> list[AnsweredToken]:
        # A token at a time: of several, those that end within a character have no probabilities.
        steps = list[AnsweredToken]()
        while len(steps) < most and (not steps or steps[-1].token not in self._ends):
            given = [*ids, *(step.token for step in steps)]
            found = self._complete(given, 1, n_probs=_TOP, return_tokens=True, cache_prompt=True)
            top = [each for one in found.get("completion_probabilities") or () for each in one["top_logprobs"]]
            tokens = found["tokens"] or [each["id"] for each in top[:1]]
            steps.append(AnsweredToken(tokens[0], [each["id"] for each in top], [each["logprob"] for each in top]))
        return steps

    def _complete(self, ids: list[int], most: int, **given: Any) -> dict[str, Any]:
        lora = [{"id": number, "scale": scale} for number, scale in enumerate(self.scales)]
        asked = {"prompt": ids, "n_predict": most, "temperature": 0, "lora": lora, **given}
        return self._ask("/completion", asked)

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection = _Connection(str(self._socket))
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise failed(f"{self.name} does not answer {path}: {describe(error)}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise failed(f"{self.name} refuses {path}: {text[:300].decode(errors='replace')}")
        return json.loads(text)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
