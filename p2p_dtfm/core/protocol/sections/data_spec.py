"""Which data a run reads, and how documents lie in its sequences."""

from typing import Literal

from pydantic import Field, model_validator

from p2p_dtfm.core.protocol.model_spec import Section


class DataSpec(Section):
    """Where the tokens come from.

    Only the founder reads `source`: "python-standard-library", "digits" (pictures that come with
    scikit-learn), or a directory that `p2p-dtfm prepare` made. Founding puts the digest of the
    manifest in `manifest`; from then on only the digest counts.
    """

    source: str = "python-standard-library"
    manifest: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    packing: Literal["plain", "documents"] = Field(
        default="plain",
        description="a sequence holds the end of one document and the beginning of others; "
        "documents: attention does not cross from one to another; positions go on",
    )
    end_of_document: int = Field(
        default=-1,
        ge=-1,
        lt=1 << 24,
        description="with documents: the token that ends each; founding fills it in",
    )

    @model_validator(mode="after")
    def _comes_from_somewhere(self) -> "DataSpec":
        if not self.source and not self.manifest:
            raise ValueError("source is empty: it says where the founder's data are")
        try:
            self.source.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("source is no text: it has half of a character") from error
        return self

    @model_validator(mode="after")
    def _ends_count(self) -> "DataSpec":
        if self.packing == "plain" and self.end_of_document >= 0:
            raise ValueError('data.end_of_document counts only with data.packing = "documents"')
        return self

    @property
    def masks_documents(self) -> bool:
        """Whether attention stays within documents."""
        return self.packing == "documents"
