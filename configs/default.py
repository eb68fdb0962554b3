"""Every field once, with its default; the other configs only override.

A field at None follows others, as its comment says; `mini_gpt.config.load` fills it in.
"""

from ml_collections import ConfigDict, FieldReference


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0  # of the initial parameters, the order of the data, and dropout
    config.context_length = 256  # tokens in a training window

    config.model = ConfigDict()
    config.model.position = FieldReference("rope", field_type=object)
    config.model.max_positions = None  # rows of the learned table; None: context_length
    config.model.dtype = "auto"  # of products: float32, bfloat16, or auto, which is bfloat16 where the hardware has it
    config.model.attention = "auto"  # reference, blockwise, cudnn (NVIDIA GPUs), splash (TPUs), or auto: the fastest
    config.model.num_layers = 4  # blocks
    config.model.d_model = 128  # width of the residual stream
    config.model.num_heads = 4  # query heads; must divide d_model
    config.model.num_kv_heads = None  # fewer than num_heads: grouped queries (Ainslie et al. 2023); None: num_heads
    config.model.d_ff = None  # None: 4 d_model, or 8/3 d_model for swiglu
    config.model.dropout = 0.0  # all three rates, unless given one by one:
    config.model.embedding_dropout = None  # of the embeddings, after the positions
    config.model.sublayer_dropout = None  # of what each sublayer adds to the residual stream
    config.model.attention_dropout = None  # of the attention weights
    config.model.norm = "layernorm"  # layernorm, rmsnorm
    config.model.norm_placement = "pre"  # pre: x + f(norm(x)); post: norm(x + f(x))
    config.model.use_bias = True  # in every projection, and in layernorm
    config.model.activation = "gelu"  # gelu (tanh form, as GPT-2), gelu_exact (by erf), relu, swiglu
    config.model.causal = True  # False: bidirectional, for the masked objective
    config.model.tie_embeddings = True  # the output projection is the embedding, transposed
    config.model.scale_embeddings = False  # embeddings drawn at 1/sqrt(d_model), times sqrt(d_model); else at 0.02
    config.model.scale_attention = True  # 1/sqrt(head width); False for ablation only
    config.model.residual = True  # False for ablation only

    config.model.remat = (
        "none"  # what is computed again for the gradient: none, dots (all but weights' products), block
    )
    config.model.scan_layers = False  # blocks stacked, gone through by a loop: 24 layers compile about as fast as 4

    config.model.attention_window = None  # keys that a query sees, itself included (Jiang et al. 2023); None: all
    config.model.random_positions = None  # draw ordered positions from so many (Ruoss et al. 2023); None: 0, 1, 2, …

    config.model.rope = ConfigDict()
    config.model.rope.base = 10_000.0  # wavelengths from 2π to nearly 2π times this
    config.model.rope.fraction = 1.0  # of the head's dimensions that are turned
    config.model.rope.scaling = "none"  # none, linear (Chen et al. 2023), ntk, yarn (Peng et al. 2023)
    config.model.rope.factor = 1.0  # how many times the original context is to be reached
    config.model.rope.original_context = None  # tokens; None: context_length / factor
    config.model.rope.beta_slow = 1.0  # yarn: pairs that turn less often in the original context are interpolated,
    config.model.rope.beta_fast = 32.0  # those that turn more often stay; 1 and 32 were chosen for LLaMA, 2,048 tokens

    config.model.sinusoidal = ConfigDict()
    config.model.sinusoidal.base = 10_000.0  # likewise
    config.model.sinusoidal.amplitude = 1.0  # in standard deviations of an embedding's entries

    config.model.t5 = ConfigDict()
    config.model.t5.num_buckets = 32  # half of them for one distance each
    config.model.t5.max_distance = 128  # from here on all distances share a bucket

    config.data = ConfigDict()
    config.data.corpus = "python_stdlib"  # python_stdlib, tiny_shakespeare, text, tfds:NAME[/CONFIG], task:NAME
    config.data.path = None  # text: a glob; tiny_shakespeare: the file; tfds: TFDS's data directory
    config.data.split = "documents"  # documents: by a hash of each; contiguous: by place in the text
    config.data.split_fractions = (0.9, 0.05, 0.05)  # train, validation, test
    config.data.tokenizer = "bytes"  # bytes, characters, bpe
    config.data.vocab_size = 8192  # of bpe, its separator included
    config.data.task_length = 20  # task:NAME: the longest problems trained on, in the task's own unit
    config.data.isolate_documents = False  # attention stays inside a document, positions restart in each
    config.data.cache_dir = None  # None: mini_gpt under $XDG_CACHE_HOME or ~/.cache

    config.train = ConfigDict()
    config.train.objective = "next_token"  # next_token, masked
    config.train.mask_rate = 0.15  # share of tokens that the masked objective predicts
    config.train.steps = 1000  # optimiser steps
    config.train.batch_size = 16  # sequences over all devices, for one optimiser step
    config.train.accumulation_steps = 1  # a step's batch is worked off in this many parts
    config.train.label_smoothing = 0.0  # in the objective only; reported losses are unsmoothed
    config.train.log_every = 10  # steps between two rows of metrics.jsonl
    config.train.nonfinite = "stop"  # at a loss or gradient that is no number: stop; skip the step; or rewind, to the
    #                                  last checkpoint, with the data moved on past that step
    config.train.nonfinite_limit = 10  # skip, rewind: how many such steps a run may have

    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # adamw, muon
    config.optimizer.learning_rate = 1e-3  # the peak; Muon's updates are as large as AdamW's, so it serves both
    config.optimizer.schedule = "inverse_sqrt"  # inverse_sqrt, cosine, wsd, constant; each after a linear warm-up
    config.optimizer.warmup_steps = 100  # linear, from nearly 0 to the peak
    config.optimizer.decay_fraction = 0.2  # wsd: share of the steps in which it decays
    config.optimizer.final_fraction = 0.1  # cosine, wsd: the last learning rate, as a share of the peak
    config.optimizer.weight_decay = 0.1  # on matrices only
    config.optimizer.b1 = 0.9  # of the gradient's mean
    config.optimizer.b2 = 0.95  # of its square's
    config.optimizer.clip_norm = 1.0  # longest gradient, all parameters together

    config.optimizer.muon = ConfigDict()  # of the blocks' matrices; embeddings, norms and biases are left to AdamW,
    config.optimizer.muon.adam_learning_rate = None  # with this peak; None: optimizer.learning_rate
    config.optimizer.muon.momentum = 0.95  # of the gradient's mean, Nesterov's
    config.optimizer.muon.newton_schulz_steps = 5  # fewer are faster, and leave the update less orthogonal

    config.eval = ConfigDict()
    config.eval.every = 250  # steps
    config.eval.tokens = 65_536  # of the validation split, while training; the end scores all of it
    config.eval.sample_tokens = 128  # text written at each evaluation; 0: none

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 250  # steps; a better evaluation is saved in between too
    config.checkpoint.keep = 2  # the last ones; the best by validation loss is kept too

    config.mesh = ConfigDict()
    config.mesh.data = -1  # devices that split the batch; -1: all that are left; the product is their number
    config.mesh.fsdp = 1  # devices that split the batch, the parameters and the optimiser state; divides the width
    config.mesh.tensor = 1  # devices that split heads and feed-forward units; divides num_kv_heads and d_ff
    return config
