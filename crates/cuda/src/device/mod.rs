//! What works on device memory, on the caller's stream: the entry points, and the kernels that they launch.
//!
//! | entry points | kernels | shared |
//! | --- | --- | --- |
//! | `tiled` | `hopper` over `fused_hopper`, `fused_portable` | `choice`, `gpu`, `matrix`, `head`, `tensor_map` |
//! | `filtered`, after `tiled` | `select_list`, `select_row`, `select_mass` | `scratch`, `told` |
//! | `filtered/together`, with `peers` | `join_lists`, `join_masses` | `scratch`, `told` |
//! | `groups` over `group_pass` | `fused_portable`, then `select` | `launch`, `scratch` |
//! | `standalone` | its own | |
//! | `peers`, `nccl`, after any of these | their own | `scratch` |
//! | `stored_rows`, for the samplers over host memory | `stored_kernels`, `survey_kernels` | `wishes`, `pinned` |

pub(crate) mod alignment;
pub(crate) mod filtered;
pub(crate) mod fused_hopper;
pub(crate) mod fused_portable;
pub(crate) mod gpu;
pub(crate) mod group_pass;
pub(crate) mod groups;
pub(crate) mod head;
pub(crate) mod hopper;
pub(crate) mod join_lists;
pub(crate) mod join_masses;
pub(crate) mod launch;
pub(crate) mod launch_config;
pub(crate) mod matrix;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod noise_math;
pub(crate) mod peers;
pub(crate) mod pinned;
pub(crate) mod queries;
pub(crate) mod results;
pub(crate) mod row_features;
pub(crate) mod scratch;
pub(crate) mod select;
pub(crate) mod select_list;
pub(crate) mod select_mass;
pub(crate) mod select_row;
pub(crate) mod standalone;
pub(crate) mod stored_kernels;
pub(crate) mod stored_rows;
pub(crate) mod survey_kernels;
pub(crate) mod tensor_map;
pub(crate) mod tiled;
