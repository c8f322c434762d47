//! Selection from logits that a draw listed or stored: rows with filters, and requests about stored rows.
//!
//! | entry points | kernels | shared |
//! | --- | --- | --- |
//! | `filtered`, after `tiled` | `filter_list`, `filter_row`, `top_p` | `scratch`, `launch_config` |
//! | `filtered/sharded_filters`, with `peers` | `filter_list_ranks`, `top_p_ranks` | `scratch`, `launch_config` |
//! | `stored_rows`, for the samplers | `stored_kernels`, `stored_scan` | `queries`, `pinned` |

pub(crate) mod filter_list;
pub(crate) mod filter_list_ranks;
pub(crate) mod filter_row;
pub(crate) mod filtered;
pub(crate) mod queries;
pub(crate) mod stored_kernels;
pub(crate) mod stored_rows;
pub(crate) mod stored_scan;
pub(crate) mod top_p;
pub(crate) mod top_p_ranks;
