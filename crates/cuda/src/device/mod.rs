//! What works on device memory, on the caller's stream: the entry points, and the kernels that they launch.
//!
//! | entry points | kernels | shared |
//! | --- | --- | --- |
//! | `tiled` | `hopper` over `fused_hopper`, `fused_portable` | `row_features`, `gpu`, `matrix`, `head`, `tensor_map` |
//! | `filtered`, after `tiled` | `filter_list`, `filter_row`, `top_p` | `scratch`, `launch_config` |
//! | `filtered/sharded_filters`, with `peers` | `filter_list_ranks`, `top_p_ranks` | `scratch`, `launch_config` |
//! | `groups` over `group_pass` | `fused_portable`, then `select` | `launch`, `scratch` |
//! | `standalone` | its own | |
//! | `peers`, `nccl`, after any of these | their own | `scratch` |
//! | `stored_rows`, for the samplers over host memory | `stored_kernels`, `stored_scan` | `queries`, `pinned` |

pub(crate) mod alignment;
pub(crate) mod filter_list;
pub(crate) mod filter_list_ranks;
pub(crate) mod filter_row;
pub(crate) mod filtered;
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
pub(crate) mod standalone;
pub(crate) mod stored_kernels;
pub(crate) mod stored_rows;
pub(crate) mod stored_scan;
pub(crate) mod tensor_map;
pub(crate) mod tiled;
pub(crate) mod top_p;
pub(crate) mod top_p_ranks;
