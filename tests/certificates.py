"""Certificates for tests, issued by a new private authority."""

from pathlib import Path

import trustme

from elastable.embedding_store.wire.access.credentials import Credentials

TOKEN = "s3cret-0123456789abcdef"


class Authority:
    """A certificate authority and what it signed, as PEM files in a new folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder, self._authority = folder, trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *identities: str) -> tuple[Path, Path]:
        """Files of a certificate for host names or IP addresses, and of its key."""
        made = self._authority.issue_cert(*identities)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        made.private_key_pem.write_to_path(key)
        return certificate, key

    def mutual(self, token: str | None = TOKEN) -> Credentials:
        """Of servers and clients of this host that take only each other."""
        certificate, key = self.issue("everyone", "localhost", "127.0.0.1")
        return Credentials(self.ca, certificate, key, token)
