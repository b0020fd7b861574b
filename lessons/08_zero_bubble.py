# %% [markdown]
# # 8 · x

# %%
from torch.autograd.graph import get_gradient_edge
from fivefold.pipeline.graph import release, take_apart, Entrance, Parts, can_be_split, follow
# %% exercise="pipeline.split_backward"
from fivefold.pipeline import split_backward

# %% check="pipeline.split_backward"
check("pipeline.split_backward", split_backward)

# %% exercise="pipeline.graph.take_apart"
from fivefold.pipeline.graph import take_apart

# %% check="pipeline.graph.take_apart"
check("pipeline.graph.take_apart", take_apart)
