"""The recommended setup of a job, and what to paste for each policy: DeepSpeed's configuration and lines of Python."""

from ebbtide.interleave.replay.recommend.recommendation import Recommendation, recommend
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob, recorded_job
from ebbtide.interleave.replay.recommend.setups import PolicySetup
from ebbtide.interleave.replay.recommend.systems import SystemSetup

__all__ = ["PolicySetup", "Recommendation", "RecordedJob", "SystemSetup", "recommend", "recorded_job"]
