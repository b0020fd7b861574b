"""Misconceptions of lesson 05: the ring."""

from __future__ import annotations

from autograde.misconception import Misconception

FORWARD = "for source, (k_block, v_block) in ring_blocks(torch.stack((k, v)), group):"
BACKWARD = "for source, (k_block, v_block) in ring_blocks(torch.stack((k, v)), ctx.group):"
SHARES = """\
if source == rank:
    own = dkv  # it stays here, until the others' shares have come home
else:
    arrive = pass_on(arrive() + dkv, ctx.group)
"""

RING_ATTENTION = [
    Misconception(
        exercise="context.ring_attention",
        name="own_share_alone",
        hint="This looks like: dK and dV have only what this rank's own queries found. The output is exact, and the "
        "gradient of q is too. Which other queries have read this rank's keys?",
        old="arrive = pass_on(arrive() + dkv, ctx.group)",
        new="arrive = pass_on(torch.zeros_like(dkv), ctx.group)",
    ),
    Misconception(
        exercise="context.ring_attention",
        name="gradients_stay",
        hint="This looks like: each rank adds up the dK and dV of all blocks that pass, into one tensor of its own. "
        "Whose keys are these the gradients of?",
        old=SHARES,
        new="""
        own = dkv if source == rank else own + dkv
        """,
        also=(("dk, dv = own + arrive()", "dk, dv = own"),),
    ),
    Misconception(
        exercise="context.ring_attention",
        name="gradients_not_sent",
        hint="This looks like: backward sends no gradients at all, and dK and dV have only what this rank's own "
        "queries found. Which other queries have read this rank's keys?",
        old=SHARES,
        new="""
        if source == rank:
            own = dkv
        """,
        also=(("dk, dv = own + arrive()", "dk, dv = own"),),
    ),
    Misconception(
        exercise="context.ring_attention",
        name="own_share_forgotten",
        hint="This looks like: dK and dV have what the other ranks found, and not what this one did. "
        "Whose queries read a rank's keys first?",
        old="dk, dv = own + arrive()",
        new="dk, dv = arrive()",
    ),
    Misconception(
        exercise="context.ring_attention",
        name="not_added_up",
        hint="This looks like: each rank sends its own share of a block's gradient on, and drops what had come of it. "
        "What have the ranks before this one found for the same block?",
        old="arrive = pass_on(arrive() + dkv, ctx.group)",
        new="arrive()\narrive = pass_on(dkv, ctx.group)",
    ),
    Misconception(
        exercise="context.ring_attention",
        name="lse_of_the_last_block",
        hint="This looks like: backward makes the probabilities with the log-sum-exp of the block that came last. "
        "Over which keys is a row's softmax?",
        old="ctx.save_for_backward(q, k, v, out, lse, positions)",
        new="ctx.save_for_backward(q, k, v, out, part[1], positions)",
    ),
    Misconception(
        exercise="context.ring_attention",
        name="another_dtype",
        hint="This looks like: the output comes in the precision in which the blocks were merged. "
        "What was the dtype of the queries?",
        old="out = out.to(q.dtype)",
        new="",
    ),
    Misconception(
        exercise="context.ring_attention",
        name="table_not_checked",
        hint="This looks like: any table of positions is taken, be it of another number of ranks or of tokens. "
        "Who would notice that a mask is made of the wrong rows?",
        old="check_positions(positions, group, q.shape[2])",
        new="",
    ),
    Misconception(
        exercise="context.ring_attention",
        name="block_by_block",
        hint="This looks like: backward makes each block's probabilities from that block alone, as if its softmax had "
        "seen no other keys. Which log-sum-exp, and which output, belong to the whole row?",
        old="dq_share, *dkv_share = block_attention_backward(dout, q, k_block, v_block, out, lse, mask)",
        new="""
        alone = block_attention(q, k_block, v_block, mask)
        dq_share, *dkv_share = block_attention_backward(dout, q, k_block, v_block, *alone, mask)
        """,
    ),
    Misconception(
        exercise="context.ring_attention",
        name="outputs_added",
        hint="This looks like: the outputs of the blocks are added up as they are, and not merged. "
        "What do the weights of one row then add up to?",
        old="out, lse = part if source == rank else merge(out, lse, *part)",
        new="out, lse = part if source == rank else (out + part[0], torch.logaddexp(lse, part[1]))",
    ),
    Misconception(
        exercise="context.ring_attention",
        name="sent_all_the_way_round",
        hint="This looks like: this rank's own share of dK and dV goes round the whole ring too. The numbers are "
        "right, and every rank sends one message more. At whose door does that share begin, and end?",
        old=SHARES,
        new="arrive = pass_on(arrive() + dkv, ctx.group) if ctx.group.size() > 1 else partial(torch.clone, dkv)",
        also=(("dk, dv = own + arrive()", "dk, dv = arrive()"),),
    ),
    Misconception(
        exercise="context.ring_attention",
        name="waits_at_once",
        hint="This looks like: a rank waits for the next block before it computes with the one that it has. The "
        "numbers are right. What could be done while the block is on its way?",
        old=FORWARD,
        new="""
        block = torch.stack((k, v))
        for step in range(group.size()):
            block = pass_on(block, group)() if step else block
            source, (k_block, v_block) = (rank - step) % group.size(), block
        """,
        also=(
            (
                BACKWARD,
                """
        block = torch.stack((k, v))
        for step in range(ctx.group.size()):
            block = pass_on(block, ctx.group)() if step else block
            source, (k_block, v_block) = (rank - step) % ctx.group.size(), block
                """,
            ),
        ),
    ),
    Misconception(
        exercise="context.ring_attention",
        name="blocks_kept",
        hint="This looks like: forward keeps every block for backward, which saves the second round. The numbers are "
        "right. How many tokens' keys and values are then on each rank?",
        old=FORWARD,
        new="""
        blocks = list(ring_blocks(torch.stack((k, v)), group))
        ctx.blocks = blocks
        for source, (k_block, v_block) in blocks:
        """,
        also=((BACKWARD, "for source, (k_block, v_block) in ctx.blocks:"),),
    ),
    Misconception(
        exercise="context.ring_attention",
        name="all_gathered",
        hint="This looks like: all keys and values are gathered in one collective. The numbers are right. "
        "How many blocks does a rank hold then, and what hides the time that they take to come?",
        old=FORWARD,
        new="""
        blocks = [torch.empty(2, *k.shape, dtype=k.dtype) for _ in range(group.size())]
        dist.all_gather(blocks, torch.stack((k, v)), group=group)
        for step in range(group.size()):
            source = (rank - step) % group.size()
            k_block, v_block = blocks[source]
        """,
    ),
    Misconception(
        exercise="context.ring_attention",
        name="mask_of_the_wrong_rank",
        hint="This looks like: the mask is made for another rank's block than the one that is here. "
        "After one step, which rank's keys does rank 0 have: those of the next one, or of the one before?",
        old="part = block_attention(q, k_block, v_block, block_mask(positions, rank, source))",
        new="""
        mirrored = (2 * rank - source) % group.size()
        part = block_attention(q, k_block, v_block, block_mask(positions, rank, mirrored))
        """,
    ),
    Misconception(
        exercise="context.ring_attention",
        name="no_mask",
        hint="This looks like: every query sees every key, whatever the positions say. Which keys stand after a query?",
        old="part = block_attention(q, k_block, v_block, block_mask(positions, rank, source))",
        new="part = block_attention(q, k_block, v_block)",
        also=(("mask = block_mask(positions, rank, source)", "mask = None"),),
    ),
]
