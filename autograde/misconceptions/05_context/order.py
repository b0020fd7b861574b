"""Misconceptions of lesson 05: the order of tokens, and what goes with them."""

from __future__ import annotations

from autograde.misconception import Misconception

ZIGZAG = [
    Misconception(
        exercise="context.zigzag",
        name="every_other",
        hint="This looks like: rank i gets chunks i and n + i. Its second chunk is later too where its first one is. "
        "Who has the most work then?",
        old="return torch.cat([chunks[c] for i in range(num_ranks) for c in (i, 2 * num_ranks - 1 - i)], dim)",
        new="return torch.cat([chunks[c] for i in range(num_ranks) for c in (i, num_ranks + i)], dim)",
    ),
    Misconception(
        exercise="context.zigzag",
        name="late_chunk_first",
        hint="This looks like: each rank's late chunk comes before its early one. "
        "In which order does the description name them?",
        old="return torch.cat([chunks[c] for i in range(num_ranks) for c in (i, 2 * num_ranks - 1 - i)], dim)",
        new="return torch.cat([chunks[c] for i in range(num_ranks) for c in (2 * num_ranks - 1 - i, i)], dim)",
    ),
    Misconception(
        exercise="context.zigzag",
        name="second_half_mirrored",
        hint="This looks like: the second half of the sequence is mirrored token by token. Chunks are dealt out from "
        "the end. In which order are the tokens inside a chunk?",
        old="return torch.cat([chunks[c] for i in range(num_ranks) for c in (i, 2 * num_ranks - 1 - i)], dim)",
        new="""
        late = [chunks[2 * num_ranks - 1 - i].flip(dim) for i in range(num_ranks)]
        return torch.cat([part for i in range(num_ranks) for part in (chunks[i], late[i])], dim)
        """,
    ),
    Misconception(
        exercise="context.zigzag",
        name="always_dimension_1",
        hint="This looks like: the tokens are taken to be in dimension 1, whatever `dim` says. "
        "Where are they in (tokens, features)?",
        old="chunks = x.tensor_split(2 * num_ranks, dim)",
        new="dim = 1\nchunks = x.tensor_split(2 * num_ranks, dim)",
    ),
    Misconception(
        exercise="context.zigzag",
        name="all_in_dimension_1",
        hint="This looks like: the tokens are taken to be in dimension 1, whatever `dim` says, and their number too. "
        "Where are they in (tokens, features)?",
        old="check_sizes(Layout(cp=num_ranks), sequence=x.shape[dim])",
        new="dim = 1\ncheck_sizes(Layout(cp=num_ranks), sequence=x.shape[dim])",
    ),
    Misconception(
        exercise="context.zigzag",
        name="uneven_without_a_word",
        hint="This looks like: a sequence that cannot be cut evenly is cut all the same. "
        "Where would rank 1's tokens then begin?",
        old="check_sizes(Layout(cp=num_ranks), sequence=x.shape[dim])",
        new="",
    ),
]

UNZIGZAG = [
    Misconception(
        exercise="context.unzigzag",
        name="zigzag_again",
        hint="This looks like: the tokens are put into zig-zag order a second time. With two ranks or more, "
        "where is chunk 1 after the first time, and where does the second time take it?",
        old="return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim)",
        new="return torch.cat([chunks[c] for i in range(num_ranks) for c in (i, 2 * num_ranks - 1 - i)], dim)",
    ),
    Misconception(
        exercise="context.unzigzag",
        name="late_chunks_not_turned",
        hint="This looks like: the late chunks are joined in the order of the ranks. "
        "Which rank has the last chunk of the sequence?",
        old="return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim)",
        new="return torch.cat([*chunks[0::2], *chunks[1::2]], dim)",
    ),
    Misconception(
        exercise="context.unzigzag",
        name="always_dimension_1",
        hint="This looks like: the tokens are taken to be in dimension 1, whatever `dim` says. "
        "Where are they in (tokens, features)?",
        old="chunks = x.tensor_split(2 * num_ranks, dim)",
        new="dim = 1\nchunks = x.tensor_split(2 * num_ranks, dim)",
    ),
    Misconception(
        exercise="context.unzigzag",
        name="all_in_dimension_1",
        hint="This looks like: the tokens are taken to be in dimension 1, whatever `dim` says, and their number too. "
        "Where are they in (tokens, features)?",
        old="check_sizes(Layout(cp=num_ranks), sequence=x.shape[dim])",
        new="dim = 1\ncheck_sizes(Layout(cp=num_ranks), sequence=x.shape[dim])",
    ),
    Misconception(
        exercise="context.unzigzag",
        name="uneven_without_a_word",
        hint="This looks like: a sequence that cannot be cut evenly is joined all the same. "
        "Could `zigzag` have made it?",
        old="check_sizes(Layout(cp=num_ranks), sequence=x.shape[dim])",
        new="",
    ),
]

CAUSAL_WORK = [
    Misconception(
        exercise="context.causal_work",
        name="not_itself",
        hint="This looks like: a query sees the keys before it, and not its own. "
        "What would the first token of a sequence attend to?",
        old="return (positions + 1).sum(dim=1)",
        new="return positions.sum(dim=1)",
    ),
    Misconception(
        exercise="context.causal_work",
        name="own_keys_only",
        hint="This looks like: only the pairs are counted whose key is on the same rank. "
        "Who computes a query's scores with the keys of other ranks?",
        old="return (positions + 1).sum(dim=1)",
        new="return torch.stack([(row[None] <= row[:, None]).sum() for row in positions])",
    ),
    Misconception(
        exercise="context.causal_work",
        name="every_pair",
        hint="This looks like: every query is counted with every key. That is the work without a mask, "
        "the same for all. Which pairs does the mask leave?",
        old="return (positions + 1).sum(dim=1)",
        new="return torch.full((positions.shape[0],), positions.shape[1] * positions.numel())",
    ),
    Misconception(
        exercise="context.causal_work",
        name="parts_in_a_row",
        hint="This looks like: rank r is taken to hold the r-th part of the sequence. What says which tokens it holds?",
        old="return (positions + 1).sum(dim=1)",
        new="return (torch.arange(positions.numel()).view_as(positions) + 1).sum(dim=1)",
    ),
]

PART = "return LocalTokens(inputs[:, positions], labels[:, positions], positions)"
LOCAL_TOKENS = [
    Misconception(
        exercise="context.local_tokens",
        name="shifted_and_counted_in_the_part",
        hint="This looks like: labels are shifted, and positions counted, in the tokens that this rank has. "
        "Which token follows the last one of its early chunk, and at which place does its late chunk begin?",
        old="""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        positions = token_positions(inputs.shape[1], group.size())[group.rank()].to(tokens.device)
        """,
        new="""
        held = token_positions(tokens.shape[1] - 1, group.size())[group.rank()].to(tokens.device)
        inputs = tokens[:, held]
        labels = torch.cat([inputs[:, 1:], tokens[:, -1:]], dim=1)
        """,
        also=((PART, "return LocalTokens(inputs, labels, torch.arange(len(held), device=tokens.device))"),),
    ),
    Misconception(
        exercise="context.local_tokens",
        name="labels_shifted_in_the_part",
        hint="This looks like: labels are shifted in the tokens that this rank has. "
        "Which rank has the token that follows the last one of its early chunk?",
        old=PART,
        new="""
        part = inputs[:, positions]
        return LocalTokens(part, torch.cat([part[:, 1:], tokens[:, -1:]], dim=1), positions)
        """,
    ),
    Misconception(
        exercise="context.local_tokens",
        name="positions_restart",
        hint="This looks like: positions are counted in the tokens that this rank has. "
        "At which place of the sequence does its late chunk begin?",
        old=PART,
        new="return LocalTokens(inputs[:, positions], labels[:, positions], torch.arange(len(positions)))",
    ),
    Misconception(
        exercise="context.local_tokens",
        name="parts_in_a_row",
        hint="This looks like: rank r has the r-th part of the sequence. All three fit together. "
        "How much work has the last rank then under a causal mask?",
        old="positions = token_positions(inputs.shape[1], group.size())[group.rank()].to(tokens.device)",
        new="""
        token_positions(inputs.shape[1], group.size())
        positions = torch.arange(inputs.shape[1]).view(group.size(), -1)[group.rank()]
        """,
    ),
    Misconception(
        exercise="context.local_tokens",
        name="rank_of_the_world",
        hint="This looks like: the part is chosen by the rank's number in the whole world. "
        "Which ranks share this sequence, and what is this one's number among them?",
        old="positions = token_positions(inputs.shape[1], group.size())[group.rank()].to(tokens.device)",
        new="positions = token_positions(inputs.shape[1], group.size())[dist.get_rank() % group.size()]",
    ),
    Misconception(
        exercise="context.local_tokens",
        name="labels_are_inputs",
        hint="This looks like: the label of a token is that token. Such a loss falls to zero fast. "
        "What is the model to guess?",
        old="inputs, labels = tokens[:, :-1], tokens[:, 1:]",
        new="inputs = labels = tokens[:, :-1]",
    ),
]
