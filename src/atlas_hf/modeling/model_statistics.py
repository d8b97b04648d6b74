"""Size and cost of a model, worked out from its configuration alone: parameters, state of a sequence, arithmetic.

Legend: D model width, H heads, K = V head width, F features, E hidden width of the memory, G its hidden matrices, c window,
b chunk, R = b + c - 1 tokens in view, P error sources (tokens, or pairs of a write and a token of its window), W writes of
Muon a chunk.
"""

from .configuration_atlas import AtlasConfig
from .feature_map import num_features

_FLOAT_BYTES = 4
_POSITION_BYTES = 8


def memory_shapes(config: AtlasConfig) -> list[tuple[int, int]]:
    """Shapes `(out, in)` of one head's memory matrices, the output matrix first (paper, Eq. 42 and 43)."""
    features = num_features(config.head_dim, config.feature_degree, config.feature_rank)
    if config.memory == "linear":
        return [(config.head_dim, features)]
    hidden = config.memory_expansion * config.head_dim
    return [(config.head_dim, hidden)] + [(hidden, features)] * (2 if config.memory == "gated" else 1)


def _memory_size(config: AtlasConfig) -> int:
    return sum(out * width for out, width in memory_shapes(config))


def parameter_count(config: AtlasConfig) -> int:
    """Parameters of `AtlasForCausalLM(config)`; a head tied to the embeddings is counted once."""
    width = config.num_attention_heads * config.head_dim
    gates = config.num_attention_heads * (3 + config.omega_window)
    projections = 5 * config.hidden_size * width + config.hidden_size * gates
    memory = config.num_attention_heads * _memory_size(config) + gates + 3 * width * config.conv_kernel_size
    memory += config.head_dim
    if config.feature_degree > 1:
        memory += config.num_attention_heads * (config.feature_degree + 1)
        if config.feature_rank < config.head_dim:
            memory += config.num_attention_heads * config.feature_rank * config.head_dim
    if config.memory != "linear" and config.residual_scale != 0:
        memory += config.num_attention_heads
    block = projections + memory + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    return embedding_parameters(config) + config.num_hidden_layers * block + config.hidden_size


def embedding_parameters(config: AtlasConfig) -> int:
    """Of `parameter_count`: the embeddings and the language modelling head."""
    return config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)


def state_bytes(config: AtlasConfig, decoding: bool = True) -> int:
    """Bytes of one sequence's cache in float32, whatever its length.

    Each layer holds, for every head, the memory's matrices, as many again with carried momentum, keys, values and gates of
    the tokens in view; and the inputs of the last convolution. While decoding it also keeps those tokens' features and what
    they have added to each matrix, so that a step need not take them in again: the default here. Keys, values and gates are
    then views of the same tensor, and separate copies for one token after a cache was reordered.
    `decoding=False`: after a prefill.
    """
    carry, shapes = config.momentum == "carry", memory_shapes(config)
    window, chunk = config.omega_window, config.chunk_size
    head = _memory_size(config) * (2 if carry else 1)
    slots, token = window + chunk - 1, 2 * config.head_dim + 3 + window
    if decoding and config.feature_degree > 1:
        token += shapes[-1][1]  # the key's features
    head += (slots - 1) * token
    if decoding:
        head += 3 if carry else 1
        for i, (out, width) in enumerate(shapes):
            by_muon = config.rule == "muon" and (i > 0 or config.output_errors == "anchored")
            head += out * width if by_muon and carry else slots * out
            head += 0 if config.momentum == "none" else slots * out
        # Of the window's tokens: errors, what moves them, the scale of the output's gradient, and the hidden units' slopes
        exact = config.output_errors == "exact" and config.inner_loss == "l2"
        seen = shapes[0][0] * (1 + (1 + carry if exact else 0)) + config.inner_norm
        if len(shapes) > 1:  # activations of all slots, lengths of W1's columns
            head += (slots + 1) * shapes[0][1]
            seen += sum(out for out, _ in shapes[1:])
        head += (window - 1) * seen
    tail = 3 * config.num_attention_heads * config.head_dim * (config.conv_kernel_size - 1)
    layer = (config.num_attention_heads * head + tail) * _FLOAT_BYTES + _POSITION_BYTES
    return config.num_hidden_layers * layer


def flops_per_token(config: AtlasConfig) -> int:
    """Floating point operations of a forward pass per token, in whole chunks and with the language modelling head.

    Two for each multiply-add of the matrix products; elementwise work, a few per cent, is left out.
    """
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    products = 5 * hidden * width + hidden * config.num_attention_heads * (3 + config.omega_window)
    products += 3 * hidden * config.intermediate_size
    recurrence = config.num_attention_heads * _recurrence_products(config) / config.chunk_size
    return round(2 * (config.num_hidden_layers * (products + recurrence) + hidden * config.vocab_size))


def _recurrence_products(config: AtlasConfig) -> int:
    """Multiply-adds of one head's memory in one chunk (docs/recurrence.md, sections 5 and 6)."""
    (value, entry), *hidden_shapes = memory_shapes(config)
    chunk, view = config.chunk_size, config.chunk_size + config.omega_window - 1
    exact = config.output_errors == "exact" and config.inner_loss == "l2"
    sources = chunk * config.omega_window if exact else view
    key, rank = config.head_dim, 0
    if config.feature_degree > 1 and config.feature_rank < key:
        rank = config.feature_rank
    features = hidden_shapes[0][1] if hidden_shapes else entry
    stacked = sum(out for out, _ in hidden_shapes)
    muon, carry = config.rule == "muon", config.momentum == "carry"
    from_start = config.decay_to == "init"

    total = 2 * chunk * key * rank  # features of keys and queries
    total += chunk * view * (key + rank)  # kernel of queries and keys
    if muon or not hidden_shapes:
        total += view * view * (key + rank)
    if from_start:
        total += 2 * chunk * (stacked or value) * features
    # Errors of the output matrix, and what it writes and reads
    if hidden_shapes:
        total += view * features * stacked + view * view * entry + chunk * view * entry
        total += sources * value * entry  # back-propagated errors
        if from_start:
            total += (view + chunk) * value * entry
    if config.inner_loss == "l2":
        total += view * value * entry
        if exact:
            total += view * value * entry * carry + sources * sources * value // 2
    by_muon = muon and config.output_errors == "anchored"
    total += _write_products(config, (value, entry), sources, by_muon)
    for shape in hidden_shapes:
        total += _write_products(config, shape, sources, muon)
    return total


def _write_products(config: AtlasConfig, shape: tuple[int, int], sources: int, by_muon: bool) -> int:
    """Multiply-adds of one matrix's writes in one chunk, and of its reads by the chunk's queries."""
    out, width = shape
    chunk, view = config.chunk_size, config.chunk_size + config.omega_window - 1
    carry, steps = config.momentum == "carry", config.newton_schulz_steps
    total = chunk * out * width  # reads of the matrix at the chunk's start
    if not by_muon:
        total += chunk * sources * out + view * out * width
        return total + (chunk + view) * out * width * carry
    writes = chunk // config.muon_interval
    if sources > view:
        total += (chunk if carry else writes) * sources * out
    if carry:
        side = min(out, width)
        schulz = 2 * side * side * out * width // side + (4 * steps - 3) * side**3 if steps else 0
        return total + chunk * view * out * width + writes * schulz + writes * chunk * out * width
    schulz = (5 * steps - 3) * view**3 if steps else 0
    total += writes * (2 * view * view * out + schulz)  # Gram matrices, the iteration and its result's errors
    return total + chunk * writes * view * out + writes * view * out + view * out * width
