//! Sampling over device memory, on the caller's stream: the entry points and their kernels.
//!
//! | entry points | kernels | shared |
//! | --- | --- | --- |
//! | `tiled` | `hopper` over `fused_hopper`, `shadow`; `fused_portable` | `row_features`, `gpu`, `matrix`, `head`, `tensor_map` |
//! | `groups` over `group_pass` | `fused_portable`, then `select` | `launch`, `scratch` |
//! | `standalone` | its own | |
//! | `row_columns` | its own, before and after those of `tiled` | |

pub(crate) mod alignment;
pub(crate) mod entries;
pub(crate) mod fused_hopper;
pub(crate) mod fused_portable;
pub(crate) mod gpu;
pub(crate) mod group_pass;
pub(crate) mod groups;
pub(crate) mod head;
pub(crate) mod hopper;
pub(crate) mod launch;
pub(crate) mod launch_config;
pub(crate) mod matrix;
pub(crate) mod noise_math;
pub(crate) mod pinned;
pub(crate) mod results;
pub(crate) mod row_columns;
pub(crate) mod row_features;
pub(crate) mod scratch;
pub(crate) mod select;
pub(crate) mod shadow;
pub(crate) mod standalone;
pub(crate) mod tensor_map;
pub(crate) mod tiled;
