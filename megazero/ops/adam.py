"""Adam under the names of DeepSpeed (`DeepSpeedCPUAdam`, `FusedAdam`) and Colossal-AI (`CPUAdam`, `HybridAdam`)."""

from megazero.optim.cpu_adam import CPUAdam, HybridAdam
from megazero.optim.fused_adam import FusedAdam

DeepSpeedCPUAdam = CPUAdam

__all__ = ["CPUAdam", "DeepSpeedCPUAdam", "FusedAdam", "HybridAdam"]
