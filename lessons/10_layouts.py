# %% [markdown]
# # 10 · Layouts
#
# *90 minutes · 6 exercises and 4 questions, 29 points · x*

# %%
import math
from fivefold import cost
from autograde import check, mine

# %% exercise="cost.pipeline_vs_zero3"
from fivefold.cost import pipeline_vs_zero3

# %% exercise="plan.place"
from fivefold.plan import place

# %% exercise="plan.fits"
from fivefold.plan import fits

# %% exercise="plan.step_seconds"
from fivefold.plan import step_seconds

# %% exercise="plan.search"
from fivefold.plan import search

# %% exercise="plan.data_seconds" bug="hidden_behind_the_whole_step"
from fivefold.plan import data_seconds
