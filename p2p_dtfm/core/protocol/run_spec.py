"""The run spec: the immutable description of one training run. Its digest names the run."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from p2p_dtfm.core.protocol.canonical import decode, digest_bytes, encode
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.layers.listed import MOST_LAYERS, ListedLayer
from p2p_dtfm.core.protocol.layers.listed import reason_against as reason_against_layers
from p2p_dtfm.core.protocol.model_spec import STEPS_LIMIT, ModelSpec, Section, with_preset
from p2p_dtfm.core.protocol.plain_words import explained, looked_up
from p2p_dtfm.core.protocol.sections.audit_spec import MICROBATCHES_LIMIT, AuditSpec
from p2p_dtfm.core.protocol.sections.checkpoint_spec import CheckpointSpec
from p2p_dtfm.core.protocol.sections.data_spec import DataSpec
from p2p_dtfm.core.protocol.sections.lora_spec import LoraSpec, reason_against
from p2p_dtfm.core.protocol.sections.optimizer_spec import OptimizerSpec
from p2p_dtfm.core.protocol.sections.privacy_spec import PrivacySpec

Codec = Literal["fp32", "fp16", "bf16", "int8", "rotated4", "rotated6", "subspace"]
ReductionCodec = Literal["fp32", "bf16", "int8", "sparse", "sign"]
TOLD_CHARACTERS = 1000
"""So much is told of what is wrong with a run spec that a peer sent."""
AUTO_CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8")
"""What "auto" stands for. Of bf16 and fp16, which are equally large, bf16 is encoded sooner."""


class BatchSpec(Section):
    """How many sequences make one step, and how many travel through a pipeline together."""

    global_batch: int = Field(ge=1, le=1 << 24, description="sequences in a step")
    microbatch: int = Field(ge=1, le=1 << 16, description="sequences in a microbatch")

    @model_validator(mode="after")
    def _microbatch_divides(self) -> "BatchSpec":
        if self.global_batch % self.microbatch:
            raise ValueError(
                f"microbatch ({self.microbatch}) must divide global_batch ({self.global_batch})"
            )
        return self


class EvaluationSpec(Section):
    """Held-out loss: how often, and on how many sequences."""

    every_steps: int = Field(default=50, ge=1, le=STEPS_LIMIT)
    sequences: int = Field(default=32, ge=1, le=1 << 24)


class SparseSpec(Section):
    """What the codec `sparse` sends: of one element in `one_in` the largest ones, in few bits."""

    one_in: int = Field(default=8, ge=1, le=1024, description="one in so many, by chance")
    keep_percent: int = Field(default=25, ge=1, le=100, description="the largest of these")
    bits: Literal[1, 2, 4, 8] = Field(default=4, description="sign and level of each")


class CodecSpec(Section):
    """How tensors travel: activations and their gradients between stages, and the reduction.

    A plan may choose from a list for each edge, and prefers the first. A word is a list of one, and
    "auto" a list of fp32, bf16 and int8. State, and the gradients that followers replay, are always
    fp32.
    """

    activations: tuple[Codec, ...] = Field(default=("fp32",), min_length=1)
    gradients: tuple[Codec, ...] = Field(
        default=("fp32",), min_length=1, description="of activations"
    )
    reduction: ReductionCodec = Field(default="fp32", description="of gradients of parameters")
    sparse: SparseSpec = SparseSpec()

    @field_validator("activations", "gradients", mode="before")
    @classmethod
    def _word_is_a_list(cls, told: object) -> object:
        if told == "auto":
            return AUTO_CODECS
        return (told,) if isinstance(told, str) else told


class SyncSpec(Section):
    """When replicas agree on parameters.

    `every_step`: gradients are reduced before each optimizer step. `local` (DiLoCo, Douillard et
    al. 2023): each pipeline takes `inner_steps` steps on its share of a step's microbatches;
    then the replicas' differences are reduced, and one Nesterov step is made with them.
    """

    mode: Literal["every_step", "local"] = "every_step"
    inner_steps: int = Field(default=8, ge=1, le=4096, description="of each pipeline in a step")
    outer_learning_rate: float = Field(default=0.7, gt=0)
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    sums: Literal["plain", "trimmed"] = Field(
        default="plain",
        description="trimmed: of each value that three replicas or more send, the largest and the "
        "smallest quarter are left out",
    )


class ComputeSpec(Section):
    """How stages compute."""

    recompute: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="run forwards again for their backwards, which saves memory: where memory "
        "would otherwise leave too few microbatches in flight, everywhere, or nowhere",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="of matrix products; auto: bf16 on devices that have units for it, else fp32",
    )


class LimitsSpec(Section):
    """What the swarm as a whole asks for."""

    min_members: int = Field(default=1, ge=1, le=4096, description="no training below this many")
    least_gain: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="a peer that would make the swarm faster by a smaller part than this stays "
        "spare; 0: everyone that helps trains",
    )


class AdmissionSpec(Section):
    """Who gets the manifest, the data and the weights of the run."""

    mode: Literal["members", "open", "invited"] = Field(
        default="members",
        description="members: data and weights go to members alone, the manifest and the tokenizer "
        "also to who asks to join; open: to everybody who asks; invited: nothing at all to anybody "
        "who does not show an invitation",
    )
    founder: str = Field(
        default="",
        pattern="^([1-9A-HJ-NP-Za-km-z]{40,64})?$",
        description="whose word invitations rest on; founding fills it in",
    )
    key: str = Field(
        default="",
        pattern="^([0-9a-f]{64})?$",
        description="seals what members of an invited run say in the directory; chosen by founding",
    )

    @model_validator(mode="after")
    def _founder_invites(self) -> "AdmissionSpec":
        if self.mode != "invited" and (self.founder or self.key):
            raise ValueError('admission.founder and admission.key count only with mode = "invited"')
        if bool(self.founder) != bool(self.key):
            raise ValueError("admission.founder and admission.key are filled in together")
        return self

    @property
    def is_invited(self) -> bool:
        return self.mode == "invited"


class RunSpec(Section):
    """Everything that decides what the run computes."""

    name: str = Field(pattern="^[a-z0-9][a-z0-9-]{0,62}$")
    seed: int = Field(default=1, ge=0, lt=1 << 63)
    total_steps: int = Field(ge=1, lt=STEPS_LIMIT)
    model: ModelSpec
    batch: BatchSpec
    optimizer: OptimizerSpec
    layers: tuple[ListedLayer, ...] = Field(
        default=(),
        max_length=MOST_LAYERS,
        description="of unlike kinds, one by one, from the first to the last; none: a GPT",
    )
    lora: LoraSpec = LoraSpec()
    data: DataSpec = DataSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    codecs: CodecSpec = CodecSpec()
    sync: SyncSpec = SyncSpec()
    compute: ComputeSpec = ComputeSpec()
    limits: LimitsSpec = LimitsSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    founding: str = Field(
        default="",
        pattern="^([0-9a-f]{16})?$",
        description="tells apart runs of one spec; `p2p-dtfm --new` chooses it",
    )
    admission: AdmissionSpec = AdmissionSpec()
    audit: AuditSpec = AuditSpec()
    privacy: PrivacySpec = PrivacySpec()

    @model_validator(mode="after")
    def _audits_repeat_bits(self) -> "RunSpec":
        is_exact = self.sync.mode == "every_step" and self.codecs.reduction == "fp32"
        if self.audit.rate and not is_exact:
            raise ValueError(
                'audit.rate needs sync.mode = "every_step" and codecs.reduction = "fp32": what '
                "else a replica remembers nobody has but itself"
            )
        if self.audit.rate and self.trains_adapters:
            raise ValueError("audit.rate with [lora]: works over a frozen model are not replayed")
        if self.audit.rate and self.microbatches_per_step > MICROBATCHES_LIMIT:
            raise ValueError(
                f"audit.rate with {counted(self.microbatches_per_step, 'microbatch')} in a step: "
                "what a stage states of each would not fit in its messages; with audits a step has "
                f"at most {MICROBATCHES_LIMIT}, so make batch.microbatch larger"
            )
        return self

    @model_validator(mode="after")
    def _ends_can_be_kept(self) -> "RunSpec":
        refused = {
            "audit.rate": bool(self.audit.rate),
            'data.packing = "documents"': self.data.masks_documents,
            "model.written_width": bool(self.model.written_width),
            'admission.mode = "open"': self.admission.mode == "open",
        }
        for name, asked in refused.items():
            if asked and self.privacy.ends:
                raise ValueError(f"{name} with privacy.ends: it shows texts to other members")
        return self

    @model_validator(mode="after")
    def _evaluation_is_whole_microbatches(self) -> "RunSpec":
        if self.evaluation.sequences % self.batch.microbatch:
            raise ValueError(
                f"evaluation.sequences ({self.evaluation.sequences}) must be a multiple of "
                f"batch.microbatch ({self.batch.microbatch})"
            )
        return self

    @model_validator(mode="after")
    def _inner_steps_have_microbatches(self) -> "RunSpec":
        if self.sync.mode == "local" and self.sync.inner_steps > self.microbatches_per_step:
            raise ValueError(
                f"sync.inner_steps ({self.sync.inner_steps}) must not be more than the "
                f"{counted(self.microbatches_per_step, 'microbatch')} of a step"
            )
        return self

    @model_validator(mode="after")
    def _inner_steps_untied(self) -> "RunSpec":
        if self.sync.mode == "local" and self.model.tied_head:
            raise ValueError(
                "model.tied_head and sync.mode local: inner steps are taken layer by layer, and "
                "the two copies of the matrix would part"
            )
        return self

    @model_validator(mode="after")
    def _signs_are_of_differences(self) -> "RunSpec":
        if self.codecs.reduction == "sign" and self.sync.mode != "local":
            raise ValueError(
                'codecs.reduction = "sign" needs sync.mode = "local": signs of single gradients '
                "would go straight into the optimizer, whose moments they spoil"
            )
        return self

    @model_validator(mode="after")
    def _trimmed_sums_are_of_whole_gradients(self) -> "RunSpec":
        is_partial = self.sync.mode == "local" or self.codecs.reduction in ("sparse", "sign")
        if self.sync.sums == "trimmed" and is_partial:
            needs = 'sync.mode = "every_step" and a codecs.reduction that sends every value'
            raise ValueError(f'sync.sums = "trimmed" needs {needs}')
        return self

    @model_validator(mode="after")
    def _adapters_can_be_trained(self) -> "RunSpec":
        reason = reason_against(self.model, self.lora, self.optimizer.kind == "muon")
        if reason is not None:
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _layers_can_be_listed(self) -> "RunSpec":
        if not self.layers:
            return self
        several = max(len(self.codecs.activations), len(self.codecs.gradients)) > 1
        refused = {
            "[lora]": self.trains_adapters,
            'optimizer.kind = "muon"': self.optimizer.kind == "muon",
            'data.packing = "documents"': self.data.masks_documents,
            "model.written_width": bool(self.model.written_width),
            "audit.rate": bool(self.audit.rate),
            "several codecs for one boundary": several,
            "privacy.ends": bool(self.privacy.ends),
        }
        for name, asked in refused.items():
            if asked:
                raise ValueError(f"{name} knows the layers of a GPT, and [[layers]] lists others")
        reason = reason_against_layers(self.layers, self.model)
        if reason is not None:
            raise ValueError(reason)
        return self

    def boundary_shape(self, layer: int) -> tuple[int, ...]:
        """The shape of what a microbatch brings to this layer from the layer before."""
        if not self.layers:
            return self.batch.microbatch, self.model.context, self.model.boundary_width
        sizes = self.layers[layer - 1].sizes
        assert layer > 0 and sizes is not None, "sizes are stated before anything is computed"
        return self.batch.microbatch, *sizes.boundary

    @property
    def stages_know_tokens(self) -> bool:
        """Whether every stage reads the tokens of its microbatches, not the two ends alone."""
        return self.data.masks_documents or self.model.written_width > 0

    @property
    def trains_adapters(self) -> bool:
        """Whether the model itself is frozen (`[lora]`)."""
        return self.lora.rank > 0

    @property
    def microbatches_per_step(self) -> int:
        return self.batch.global_batch // self.batch.microbatch

    @property
    def evaluation_microbatches(self) -> int:
        return self.evaluation.sequences // self.batch.microbatch

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch * self.model.context

    def tokens_per_s(self, step_ns: int) -> float:
        """Tokens per second at steps of this duration, which is above zero."""
        return self.tokens_per_step * 1e9 / step_ns

    def canonical_bytes(self) -> bytes:
        """Canonical bytes; floats as their shortest decimal text, which reads back exactly."""
        return self._canonical

    @cached_property
    def _canonical(self) -> bytes:
        values = self.model_dump(mode="python")
        values["model"] = self.model.stated()
        if not self.founding:
            del values["founding"]
        if not self.layers:
            del values["layers"]
        self.optimizer.without_later_defaults(values["optimizer"])
        if not self.data.masks_documents:
            del values["data"]["packing"], values["data"]["end_of_document"]
        if not self.trains_adapters:
            del values["lora"]
        if not self.limits.least_gain:
            del values["limits"]["least_gain"]
        if not self.admission.founder:
            del values["admission"]["founder"], values["admission"]["key"]
        if self.sync.sums == "plain":
            del values["sync"]["sums"]
        self.audit.without_later_defaults(values)
        if not self.privacy.ends:
            del values["privacy"]
        return encode(_floats_to_text(values))

    def saves_at(self, step: int) -> bool:
        """Whether the states after so many steps are written to the disk."""
        return self.checkpoint.saves_at(step, self.audit.undo_every) or step == self.total_steps

    @property
    def unmarked(self) -> "RunSpec":
        """The spec without what one founding of it filled in."""
        open_to = AdmissionSpec(mode=self.admission.mode)
        return self.model_copy(update={"founding": "", "admission": open_to})

    def digest(self) -> str:
        """The name of the run."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_bytes(self._canonical)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Pydantic's copy, without the values cached for the original."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("_canonical", "_digest"):
            copied.__dict__.pop(name, None)
        return copied

    @classmethod
    def from_canonical_bytes(cls, payload: bytes) -> "RunSpec":
        """Read what a peer sent. Raises `PeerFault`."""
        try:
            spec = cls.model_validate(decode(payload, dict[str, Any], limit_bytes=1 << 16))
        except ValidationError as error:
            told = str(error)[:TOLD_CHARACTERS]  # a stranger may make thousands of mistakes
            raise PeerFault(f"run spec that does not validate: {told}") from error
        if any(layer.sizes is None for layer in spec.layers):
            raise PeerFault("run spec that lists layers without their sizes")
        return spec


def _floats_to_text(value: Any) -> Any:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {key: _floats_to_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_floats_to_text(item) for item in value]
    return value


def parse_run_spec(values: dict[str, Any], origin: str) -> RunSpec:
    """Validate what a configuration file says. Raises `UserError` naming every wrong key."""
    if isinstance(values.get("model"), dict):
        try:
            values = {**values, "model": with_preset(values["model"])}
        except ValueError as error:
            fix = f"change model.preset (now {looked_up(values, ['model', 'preset'])!r})"
            raise UserError(f"{origin}: model.{error}", fix) from error
    try:
        return RunSpec.model_validate(values)
    except ValidationError as error:
        causes, fixes = [], []
        for item in error.errors():
            cause, fix = explained(item, values, RunSpec)
            causes.append(cause)
            fixes.append(fix)
        raise UserError(f"{origin}: " + "; ".join(causes), tuple(fixes)) from error
