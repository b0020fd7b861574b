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
# %%
from fivefold.pipeline import *
from fivefold.pipeline import Durations, simulate

# %% exercise="pipeline.marginal_idle"
from fivefold.pipeline import marginal_idle

# %% check="pipeline.marginal_idle"
check("pipeline.marginal_idle", marginal_idle)
# %% exercise="pipeline.zb_h1"
from fivefold.pipeline import zb_h1

# %% check="pipeline.zb_h1"
check("pipeline.zb_h1", zb_h1)
# %% exercise="pipeline.zb_h2"
from fivefold.pipeline import zb_h2

# %% check="pipeline.zb_h2"
check("pipeline.zb_h2", zb_h2)
# %% exercise="pipeline.zb_v"
from fivefold.pipeline import zb_v

# %% check="pipeline.zb_v"
check("pipeline.zb_v", zb_v)
# %% exercise="pipeline.dualpipe"
from fivefold.pipeline import dualpipe

# %% check="pipeline.dualpipe"
check("pipeline.dualpipe", dualpipe)
