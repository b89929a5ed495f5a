"""A store of buckets on loopback: moto's server plays S3, as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from tests.ports import reserved_port

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "secretsecretsecret", "AWS_REGION": "us-east-1"}


class Store:
    """An account of any name owns its buckets; nobody else reads them."""

    def __init__(self, url: str) -> None:
        from boto3 import Session

        self.url = url
        account = Session("testing", ENVIRONMENT["AWS_SECRET_ACCESS_KEY"], region_name=ENVIRONMENT["AWS_REGION"])
        self._client = account.client("s3", endpoint_url=url)

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which botocore finds it."""
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": self.url, "AWS_EC2_METADATA_DISABLED": "true"}

    def make(self, bucket: str) -> None:
        self._client.create_bucket(Bucket=bucket)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=bucket, Key=key, Body=data)

    def get(self, bucket: str, key: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def begin(self, bucket: str, key: str) -> None:
        """Begin an upload in parts, which nobody ends."""
        upload = self._client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        self._client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"part")

    def begun(self, bucket: str) -> list[str]:
        """The keys of uploads in parts that have not ended."""
        return [one["Key"] for one in self._client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())]

    def keys(self, bucket: str) -> list[str]:
        return [one["Key"] for one in self._client.list_objects_v2(Bucket=bucket).get("Contents", ())]


@contextmanager
def serve(log: Path) -> Iterator[Store]:
    """An empty store, until the end of the block."""
    with reserved_port() as port, open(log, "wb") as output:
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            store = Store(f"http://127.0.0.1:{port}")
            deadline = time.monotonic() + 60
            while True:
                try:
                    requests.get(f"{store.url}/moto-api/", timeout=5)
                    break
                except requests.ConnectionError:
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.1)
            yield store
        finally:
            process.kill()
            process.wait()
