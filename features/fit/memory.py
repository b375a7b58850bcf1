"""The device memory of the job that `ebbtide dry-run --model` writes, by arithmetic:
the tensors of transformers' layers, operation by operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ebbtide.features.fit.shape import LORA_RANK, ModelShape
from ebbtide.model_job import CHUNK, ModelJob

_FULL, _HALF = 4, 2
# Moments of 8 bits with a scale in fp32 for each 256; weights of 4 bits with a scale
# in 8 bits for each 64, and one in fp32 for each 256 of these.
_MOMENTS_8_BIT = 2 * (1 + 4 / 256)
_WEIGHT_4_BIT = 0.5 + 1 / 64 + 4 / 64 / 256
# Bytes of the state of a trained parameter over the bytes of the parameter.
_STATES = {"adamw": 2.0, "sgd": 1.0}
# Layers that FSDP has gathered in the backward, with gradients that are sent.
_GATHERED_LAYERS = {True: 2.2, False: 3}
# The buffer of the weights that DDP sends at the start.
_BROADCAST = 250 * 2**20
# The workspaces of cuBLAS, of two threads: from Hopper on, and before.
_HOPPER_WORKSPACE, _WORKSPACE = 2 * 32 * 2**20, 2 * 8519680


@dataclass(frozen=True)
class MemoryParts:
    """Device memory of a rank at its peak, by part."""

    moment: str  # The part of the iteration where the peak is.
    weights: float
    state: float
    gradients: float
    activations: float
    logits: float
    working: float  # Temporary tensors, and workspaces.

    @property
    def parts(self) -> dict[str, float]:
        """The bytes of each part by its name."""
        parts = {**vars(self)}
        del parts["moment"]
        return parts

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryModel:
    """Counts the memory of a job of a shape, on a GPU."""

    job: ModelJob
    shape: ModelShape
    is_hopper: bool = False  # Whether the GPU is of compute capability 9 or more.

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step on a rank."""
        return self.job.batch * self.job.sequence

    @property
    def is_adapted(self) -> bool:
        """Whether adapters alone are trained."""
        return self.job.method != "full"

    @property
    def is_mixed(self) -> bool:
        """Whether products are cast by autocast."""
        return self.job.precision == "bf16-mixed"

    @property
    def has_copies(self) -> bool:
        """Whether each adapter casts its input: to fp32, and back for its product. On
        weights of 4 bits they do not."""
        return self.is_mixed and self.job.method == "lora"

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is not quantized."""
        return _FULL if self.is_mixed and not self.is_adapted else _HALF

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained parameter, and of its gradient."""
        return _FULL if self.is_mixed else self.weight_bytes

    @property
    def trained_layer(self) -> int:
        """Trained parameters of a layer."""
        shape = self.shape
        return shape.adapter_params if self.is_adapted else shape.layer_params

    @property
    def trained(self) -> int:
        """All trained parameters."""
        own = self.shape.layers * self.trained_layer
        return own if self.is_adapted else self.shape.params

    @property
    def is_sharded(self) -> bool:
        """Whether ranks share weights, gradients and state."""
        return self.job.strategy == "fsdp"

    @property
    def share(self) -> float:
        """The share of weights, gradients and state that a rank keeps."""
        return 1 / self.job.ranks if self.is_sharded else 1.0

    def weights(self) -> float:
        """Return the bytes of weights that a rank keeps, with adapters."""
        shape, size = self.shape, self.weight_bytes
        own = float(size * shape.params)
        if self.job.method == "qlora":
            linear = shape.layers * shape.linear_params
            own += linear * (_WEIGHT_4_BIT - size)
        adapters = self.trained_bytes * self.trained if self.is_adapted else 0
        return self.share * (own + adapters)

    def state(self) -> float:
        """Return the bytes of optimizer state on the device."""
        optimizer = self.job.optimizer
        if self.job.offloads_optimizer or optimizer.startswith("paged"):
            return 0.0
        if optimizer == "adamw-8bit":
            return self.share * self.trained * _MOMENTS_8_BIT
        return self.share * self.trained * self.trained_bytes * _STATES[optimizer]

    def layer_kept(self) -> float:
        """Return the bytes of a token that a layer keeps for its backward."""
        shape = self.shape
        h, q, kv = shape.hidden, shape.queries, shape.keys
        kept = self._norm(h, 3) + self._norm(h, 2)
        if shape.has_query_norms:
            kept += self._norm(q, 0, shape.heads) + self._norm(kv, 0, shape.kv_heads)
        kept += _HALF * (2 * q + 2 * kv) + _FULL * shape.heads
        if self.has_copies:
            kept += _HALF * q  # The adapter's own copy of the output of attention.
        kept += 4 * _HALF * shape.inner
        return kept + self._adapters_kept()

    def _norm(self, width: int, readers: int, rows: int = 1) -> float:
        """Return the bytes of a token that a norm keeps, with its output where linear
        layers read it."""
        kept = _FULL * (width + rows)
        if not self.is_adapted:
            kept += self.weight_bytes * width
        if self.has_copies or (self.is_mixed and not self.is_adapted):
            return kept + _HALF * width * readers
        return kept + (_HALF * width if readers else 0)

    def _adapters_kept(self) -> float:
        if not self.is_adapted:
            return 0.0
        return LORA_RANK * _HALF * len(self.shape.linears)

    def layer_working(self) -> float:
        """Return the bytes of a token that the backward of a layer takes beside what
        the layer keeps: in the feed-forward network, the gradients of three tensors
        instead of the first one."""
        own = 2 * _HALF * self.shape.inner + self.residual_bytes
        comes_back = self.job.offloads_activations and not self.job.checkpointing
        if not self.has_copies or comes_back:
            return own
        # An adapter's gradient of the widest tensor is in fp32.
        return own + _FULL * self.shape.inner + _HALF * self.shape.hidden

    def returned(self) -> float:
        """Return the bytes of a token that a layer computes again, or that come back
        from the host, at its peak."""
        if self.job.checkpointing:
            # Without an early stop it computes its output, too.
            outputs = 2 * self.job.offloads_activations
            return self.layer_kept() + outputs * self.residual_bytes
        if self.job.offloads_activations:
            return 3 * _HALF * self.shape.inner
        return 0.0

    @property
    def residual_bytes(self) -> float:
        """Bytes of a token between two layers."""
        return self.shape.hidden * self.weight_bytes

    def kept(self, layers: int) -> float:
        """Return what the first layers keep on the device until the backward."""
        if self.job.offloads_activations:
            return 0.0
        if self.job.checkpointing:
            return layers * self.residual_bytes * self.tokens
        # The first norm of adapted models has no gradient to compute.
        first = _FULL * self.shape.hidden if self.is_adapted else 0
        return (layers * self.layer_kept() - first) * self.tokens

    def offloaded_activations(self) -> float:
        """Return the bytes of activations of layers that a micro-step copies to the
        host."""
        if not self.job.offloads_activations:
            return 0.0
        own = replace(self, job=replace(self.job, offloads_activations=False))
        return own.kept(self.shape.layers)

    def cast_weights(self, layers: int) -> float:
        """Return the bytes of weights that autocast casts, of layers and the head."""
        if not self.is_mixed or self.is_adapted:
            return 0.0
        shape = self.shape
        return _HALF * (layers * shape.linear_params + shape.embedding_params)

    def logit_bytes(self) -> tuple[float, float]:
        """Return the bytes of logits at their peaks in forward and backward: logits,
        copies in fp32, and gradients in fp32."""
        rows = self.tokens
        if self.job.loss == "chunked":
            rows = min(rows, CHUNK)
        one = float(rows * self.shape.vocabulary)
        return 10 * one, 12 * one

    def moments(self) -> Iterator[MemoryParts]:
        """Yield the moments of an iteration where the peak may be."""
        job, shape, size = self.job, self.shape, self.trained_bytes
        layers, tokens = shape.layers, self.tokens
        leaves = job.offloads_optimizer
        stays = job.micro_steps > 1 and not leaves
        gradients = 0.0 if leaves else self.share * size * self.trained
        before = gradients if stays else 0.0
        head = 0.0 if self.is_adapted else float(size * shape.embedding_params)
        residual = self.residual_bytes * tokens
        final = residual if job.offloads_activations else self._final_kept() * tokens
        most, cast = self.kept(layers) + final, self.cast_weights(layers)
        forward, backward = self.logit_bytes()
        gathered = self.gathered(1)
        yield self._at("loss", before, most + cast, forward, gathered)
        if job.checkpointing:
            cast = self.cast_weights(0)
        grown = head if self.is_sharded or not stays else 0.0
        grown = before + (0.0 if leaves else grown)
        if job.loss == "chunked" and tokens > CHUNK:
            # The gradient of the head adds up, and that of hidden states.
            for logits, working in ((backward, 0.0), (backward / 6, head)):
                working += residual + gathered
                yield self._at("loss", grown, most + cast, logits, working)
        else:
            yield self._at("loss", before, most + cast, backward, gathered)
        one = self.returned() * tokens
        if job.checkpointing and cast:
            cast += _HALF * shape.linear_params
        work = self._work()
        work += self.gathered(_GATHERED_LAYERS[self.is_adapted])
        kept = self.kept(layers) + one + cast
        yield self._at("backward of the last layer", grown, kept, 0, work)
        if cast and not job.checkpointing:
            cast -= self.cast_weights(layers - 1)
        last = gradients
        if self.is_sharded:
            last += head - before
        elif not stays and not leaves:
            last -= size * self.trained_layer + (0 if shape.is_tied else head)
        kept = self.kept(1) + one + cast
        yield self._at("backward of the first layer", last, kept, 0, work)
        extra = head if stays or shape.is_tied or leaves else 0.0
        if self.is_sharded:
            extra += 2 * head + self.gathered(1)
        elif job.strategy == "ddp" and shape.is_tied:
            extra += head  # The sum of both ends is copied into its bucket.
        working = extra + residual
        yield self._at("gradient of the embedding", gradients, 0, 0, working)
        yield self._at("update", gradients, 0, 0, 0)
        yield self._at("broadcast of weights", -self.state(), 0, 0, self._broadcast())

    def gathered(self, layers: float) -> float:
        """Return the bytes of weights of other ranks that are on the device: of layers
        and both ends."""
        if not self.is_sharded:
            return 0.0
        ends = self.shape.params - self.shape.layers * self.shape.layer_params
        own = self.shape.layer_params
        if self.is_adapted:
            own += self.shape.adapter_params
        return _HALF * (ends + layers * own)

    def _broadcast(self) -> float:
        """Return the buffer of the weights that DDP sends at the start."""
        if self.job.strategy != "ddp":
            return 0.0
        return min(_BROADCAST, self.weights())

    def _at(
        self,
        moment: str,
        gradients: float,
        activations: float,
        logits: float,
        working: float,
    ) -> MemoryParts:
        shape, tokens = self.shape, self.tokens
        fixed = _HOPPER_WORKSPACE if self.is_hopper else _WORKSPACE
        fixed += 2 * self.job.sequence * shape.head_size * _HALF + 8 * tokens
        if self.job.strategy == "ddp":
            fixed += self.trained_bytes * self.trained  # The buckets of gradients.
        return MemoryParts(
            moment,
            self.weights(),
            self.state(),
            gradients,
            activations,
            logits,
            fixed + working,
        )

    def _final_kept(self) -> float:
        """Return the bytes of a token that the last norm keeps, with its output."""
        return self._norm(self.shape.hidden, 0 if self.is_adapted else 1)

    def _work(self) -> float:
        """Return the temporary tensors of the backward of a layer: with the gradient of
        its largest matrix, or with a frozen one of 4 bits that is unpacked before there
        is a second gradient."""
        own, shape = self.layer_working() * self.tokens, self.shape
        largest = shape.hidden * shape.inner
        if self.job.method == "qlora":
            return own + _HALF * max(0, largest - shape.inner * self.tokens)
        return own if self.is_adapted else own + self.trained_bytes * largest

    def host_bytes(self) -> float:
        """Return the host memory of a rank: of weights that are loaded there, or what
        is offloaded."""
        job, shape = self.job, self.shape
        # FSDP shards the weights that the host has loaded.
        loaded = float(self.weight_bytes * shape.params) if self.is_sharded else 0.0
        offloaded = 0.0
        if job.offloads_optimizer:
            offloaded += 4 * self.trained_bytes * self.trained
        if job.optimizer.startswith("paged"):
            offloaded += self.trained * _MOMENTS_8_BIT
        if job.offloads_activations:
            offloaded += self.offloaded_activations()
            offloaded += self._final_kept() * self.tokens + 4 * self.tokens
        return max(loaded, offloaded)

    def peak(self) -> MemoryParts:
        """Return the memory at the peak of an iteration."""
        return max(self.moments(), key=lambda one: one.total)
