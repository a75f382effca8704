"""Hugging Face's `Trainer` as a peer, with models of random weights."""

import pytest
import torch

from optim import LocalSwarm, LowCommunicationOptimizer, recipe

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from optim.hf import ShoalCallback
from protocol.errors import SettingsError

pytestmark = pytest.mark.filterwarnings("default")  # theirs

STEPS = 8


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=16, tie_word_embeddings=True,
        )
    )  # fmt: skip


def sentences(seed):
    tokens = torch.randint(32, (128, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_trainer(model, folder, seed=0, **options):
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "seed": 1,
            **options,
        }
    )
    return Trainer(model, arguments, train_dataset=sentences(seed))


def values(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_lone_peer_that_keeps_its_own_steps_is_the_trainer_alone(tmp_path, alone):
    plain, model = gpt2(), gpt2()
    options = {"gradient_accumulation_steps": 2, "warmup_steps": 2, "max_grad_norm": 0.5, "weight_decay": 0.1}
    make_trainer(plain, tmp_path, **options).train()
    callback = ShoalCallback(alone, recipe("fedavg", inner_steps=4))
    trainer = make_trainer(model, tmp_path, **options)
    callback.attach(trainer)
    trainer.train()
    assert callback.optimizer.rounds == 2
    assert alone.weights == [4.0, 4.0]
    assert not torch.equal(values(plain), values(gpt2()))
    torch.testing.assert_close(values(model), values(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make_model", [gpt2, llama])
def test_a_trainer_and_a_loop_of_ones_own_are_peers(tmp_path, make_model):
    swarm = LocalSwarm(2)
    method = recipe("diloco", inner_steps=4)
    models = dict(zip(swarm.peers, (make_model(), make_model()), strict=True))  # here: threads share the seed

    def replica(peer):
        model = models[peer]
        if peer is swarm.peers[0]:
            trainer = make_trainer(model, tmp_path, bf16=True)
            ShoalCallback(peer, method).attach(trainer)
            trainer.train()
        else:
            optimizer = LowCommunicationOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), peer, method)
            for sentence in sentences(1)[:STEPS]:
                optimizer.zero_grad()
                model(**{name: tokens[None] for name, tokens in sentence.items()}).loss.backward()
                optimizer.step()
            optimizer.finish()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        return values(model)

    one, other = swarm.run(replica)
    assert torch.equal(one, other)
    assert not torch.equal(one, values(make_model()))


def test_a_checkpoint_goes_on(tmp_path, alone):
    def trainer(folder, **options):
        trainer = make_trainer(gpt2(), tmp_path / folder, bf16=True, **options)
        callback = ShoalCallback(alone, recipe("diloco", inner_steps=3))
        callback.attach(trainer)
        return trainer, callback

    whole, whole_callback = trainer("whole", save_strategy="steps", save_steps=5)
    whole.train()
    resumed, callback = trainer("whole", save_strategy="steps", save_steps=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert callback.optimizer.rounds == whole_callback.optimizer.rounds == 2
    assert torch.equal(callback.optimizer.outer.buffers["momentum"], whole_callback.optimizer.outer.buffers["momentum"])
    assert torch.equal(values(resumed.model), values(whole.model))


def test_a_trainer_may_train_again(tmp_path, alone):
    trainer = make_trainer(gpt2(), tmp_path)
    callback = ShoalCallback(alone, recipe("streaming", inner_steps=4, fragments=2))
    callback.attach(trainer)
    trainer.train()
    optimizer = callback.optimizer
    assert optimizer.rounds == 3
    trainer.train()
    assert callback.optimizer is optimizer
    assert optimizer.rounds == 7


def test_before_the_training_there_is_no_optimizer(alone):
    with pytest.raises(SettingsError, match="has not begun"):
        _ = ShoalCallback(alone, recipe("diloco")).optimizer
