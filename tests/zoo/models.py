"""Third-party models in tiny random configurations, with batches as their users have them.

Nothing is downloaded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

BATCHES, ROWS, LENGTH, VOCABULARY = 4, 4, 12, 64


class Learner(L.LightningModule):
    """Trains a third-party model.

    Args:
        model: The model.
        batches: Training batches, in order.
        step: Function of model and batch that returns the loss.
    """

    def __init__(
        self, model: nn.Module, batches: list[Any], step: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self.batches, self.step = batches, step
        self.begun = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begun = True
        loss = self.step(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        # With Adam's usual epsilon, gradients that are zero except for rounding would cause full
        # steps, and a changed order of summation would look like another training.
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        turn = self.global_rank % len(self.batches)  # each rank has batches of its own
        return DataLoader(self.batches[turn:] + self.batches[:turn], batch_size=None)  # type: ignore[arg-type]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model of ``transformers`` computes."""
    loss: Tensor = model(**batch).loss
    return loss


def each_batch(make: Callable[[torch.Generator], Any]) -> list[Any]:
    """Return ``BATCHES`` batches drawn with one generator."""
    generator = torch.Generator().manual_seed(1)
    return [make(generator) for _ in range(BATCHES)]


def tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)


def classes(generator: torch.Generator, number: int) -> Tensor:
    return torch.randint(number, (ROWS,), generator=generator)


def images(generator: torch.Generator, size: int = 16) -> Tensor:
    return torch.randn(ROWS, 3, size, size, generator=generator)


def encodings(labels: str, padded: bool = True) -> list[Any]:
    """Return batches as a tokenizer does: ``BatchEncoding``, padded to the longest row.

    Args:
        labels: ``"causal"`` for the input itself, ``"masked"`` for parts of it, ``"class"`` for one
            of three classes per row, ``"sequence"`` for another text.
        padded: Rows have different lengths.
    """
    from transformers import BatchEncoding

    generator = torch.Generator().manual_seed(1)
    batches = []
    for number in range(BATCHES):
        length = LENGTH - number % 2 * 3  # bucketed: the batches differ in length
        ids = tokens(generator, length)
        mask = torch.ones_like(ids)
        if padded:
            for row in range(1, ROWS):
                mask[row, length - row :] = 0
        ids = ids * mask
        batch = {"input_ids": ids, "attention_mask": mask}
        if labels == "causal":
            batch["labels"] = ids.masked_fill(mask == 0, -100)
        elif labels == "masked":
            is_hidden = torch.rand(ids.shape, generator=generator) < 0.3
            batch["labels"] = ids.masked_fill(~is_hidden | (mask == 0), -100)
        elif labels == "sequence":
            batch["labels"] = tokens(generator, 5)
        else:
            batch["labels"] = classes(generator, 3)
        batches.append(BatchEncoding(batch))
    return batches


def labelled_images() -> list[Any]:
    return each_batch(lambda draw: {"pixel_values": images(draw), "labels": classes(draw, 5)})


def spectrograms() -> list[Any]:
    return each_batch(
        lambda draw: {
            "input_features": torch.randn(ROWS, 8, 20, generator=draw),
            "labels": tokens(draw, 6),
        }
    )


def captioned_images() -> list[Any]:
    return each_batch(
        lambda draw: {
            "input_ids": tokens(draw), "pixel_values": images(draw), "return_loss": True,
        }
    )  # fmt: skip


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "intermediate_size": 48}
DECODER = {**TEXT, **SPECIAL, "num_key_value_heads": 2, "max_position_embeddings": 32}
IMAGE = {**SMALL, "intermediate_size": 48, "image_size": 16, "patch_size": 4}
SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, **SPECIAL,
}  # fmt: skip

TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], Callable[[], list[Any]]]] = {
    "GPT-2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4,
            "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.1,
        },
        lambda: encodings("causal"),
    ),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", DECODER, lambda: encodings("causal")),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", DECODER, lambda: encodings("causal", False)),
    "Mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        lambda: encodings("causal"),
    ),
    "BERT": ("BertConfig", "BertForMaskedLM", TEXT, lambda: encodings("masked")),
    "DeBERTa": (
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        {
            **TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8, "num_labels": 3,
        },
        lambda: encodings("class"),
    ),
    "T5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
            "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
        },
        lambda: encodings("sequence"),
    ),
    "BART": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            **SEQ2SEQ, "max_position_embeddings": 32, "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
        lambda: encodings("sequence"),
    ),
    "Whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16,
            "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
        },
        spectrograms,
    ),
    "ViT": ("ViTConfig", "ViTForImageClassification", {**IMAGE, "num_labels": 5}, labelled_images),
    "Swin": (
        "SwinConfig",
        "SwinForImageClassification",
        {
            "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2],
            "num_heads": [2, 2], "window_size": 4, "num_labels": 5,
        },
        labelled_images,
    ),
    "ConvNeXt": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {
            "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 2], "image_size": 16,
            "num_labels": 5,
        },
        labelled_images,
    ),
    "CLIP": (
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": {**DECODER, "num_key_value_heads": 4}, "vision_config": IMAGE,
            "projection_dim": 16,
        },
        captioned_images,
    ),
    "Mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {
            "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4,
            "time_step_rank": 2, **SPECIAL,
        },
        lambda: encodings("causal", False),
    ),
}  # fmt: skip
"""Class of the configuration, class of the model, settings and batches."""


def from_transformers(name: str) -> Learner:
    import transformers

    configuration, kind, settings, batches = TRANSFORMERS[name]
    model = getattr(transformers, kind)(getattr(transformers, configuration)(**settings))
    return Learner(model, batches(), loss_of)


def lora() -> Learner:
    """Low-rank adapters on a frozen base."""
    from peft import LoraConfig, get_peft_model

    base = from_transformers("Llama")
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return Learner(get_peft_model(base.model, settings), base.batches, loss_of)


@dataclass
class Noised:
    """A batch as a dataclass."""

    image: Tensor
    noise: Tensor
    time: Tensor


def unet() -> Learner:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    batches = each_batch(lambda draw: Noised(images(draw, 8), images(draw, 8), classes(draw, 1000)))

    def step(model: nn.Module, batch: Noised) -> Tensor:
        assert {field.name for field in fields(batch)} == {"image", "noise", "time"}
        predicted = model(batch.image + batch.noise, batch.time).sample
        return nn.functional.mse_loss(predicted, batch.noise)

    return Learner(model, batches, step)


def graph_network() -> Learner:
    """Graphs of different sizes in one sparse batch."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCN, global_mean_pool

    generator = torch.Generator().manual_seed(1)

    def graph(nodes: int) -> Data:
        return Data(
            x=torch.randn(nodes, 6, generator=generator),
            edge_index=torch.randint(nodes, (2, 3 * nodes), generator=generator),
            y=torch.randint(3, (1,), generator=generator),
        )

    batches = [
        Batch.from_data_list([graph(3 + (row + number) % 4) for row in range(ROWS)])
        for number in range(BATCHES)
    ]

    def step(model: nn.Module, batch: Any) -> Tensor:
        nodes = model(batch.x, batch.edge_index)
        return nn.functional.cross_entropy(global_mean_pool(nodes, batch.batch), batch.y)

    return Learner(GCN(6, 16, num_layers=3, out_channels=3), batches, step)


def torch_transformer() -> Learner:
    """torch's own encoder, with a causal mask of -inf in a buffer."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3)
            self.head = nn.Linear(16, VOCABULARY)
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
            self.register_buffer("mask", mask)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.encoder(self.embedding(ids), mask=self.mask, is_causal=True)
            result: Tensor = self.head(hidden)
            return result

    batches = each_batch(lambda draw: (tokens(draw), tokens(draw)))

    def step(model: nn.Module, batch: Any) -> Tensor:
        ids, targets = batch
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    return Learner(Encoder(), batches, step)


def lstm() -> Learner:
    """torch's own LSTM on packed sequences of different lengths."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 16)
            self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=0.1)
            self.head = nn.Linear(16, 5)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            _, (last, _) = self.lstm(packed)
            result: Tensor = self.head(last[-1])
            return result

    batches = each_batch(
        lambda draw: {
            "ids": tokens(draw), "lengths": 3 + classes(draw, LENGTH - 3),
            "labels": classes(draw, 5),
        }
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["ids"], batch["lengths"]), batch["labels"])

    return Learner(Tagger(), batches, step)


def lightning_demo() -> Learner:
    """Lightning's demo transformer, which takes input and target."""
    from lightning.pytorch.demos import Transformer

    batches = each_batch(lambda draw: (tokens(draw), tokens(draw)))

    def step(model: nn.Module, batch: Any) -> Tensor:
        output = model(*batch)
        return nn.functional.nll_loss(output, batch[1].view(-1))

    model = Transformer(vocab_size=VOCABULARY, ninp=16, nhead=2, nhid=16, nlayers=2, dropout=0.1)
    return Learner(model, batches, step)


MODELS: dict[str, Callable[[], Learner]] = {
    **{name: functools.partial(from_transformers, name) for name in TRANSFORMERS},
    "LoRA on Llama": lora,
    "UNet": unet,
    "GCN": graph_network,
    "torch Transformer": torch_transformer,
    "torch LSTM": lstm,
    "Lightning Transformer": lightning_demo,
}
"""By their names in the documentation."""


def make(name: str) -> Learner:
    """Return a model with the same weights at each call."""
    torch.manual_seed(0)
    return MODELS[name]()
