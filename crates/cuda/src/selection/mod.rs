//! Selection from logits that a launch listed or stored: rows with filters, and queries of stored rows.
//!
//! | entry points | kernels | shared |
//! | --- | --- | --- |
//! | `filtered`, after `tiled` | its own, `top_p` | `scratch`, `launch_config` |
//! | `filtered/sharded_filters`, with `peers` | its own, `top_p` | `scratch`, `launch_config` |
//! | `existing_filters`, after `standalone` | its own, `filtered/logit_filters` | `scratch` |
//! | `row_logprobs`, after `filtered` or `existing_filters` | its own, `stored_kernels` | `scratch`, `launch_config` |
//! | `stored_rows`, for the samplers | `stored_kernels`, `stored_scan` | `queries`, `pinned` |

pub(crate) mod existing_filters;
pub(crate) mod filtered;
pub(crate) mod queries;
pub(crate) mod row_logprobs;
pub(crate) mod stored_kernels;
pub(crate) mod stored_rows;
pub(crate) mod stored_scan;
pub(crate) mod top_p;

pub(crate) use existing_filters::ExistingFilters;
pub(crate) use filtered::{DeviceFilters, FilterKinds, FilteredRows, LogitFilters, rows_within};
pub(crate) use queries::{CanonicalInputs, Kind, Query, QueryResults};
pub(crate) use row_logprobs::DeviceLogprobs;
pub(crate) use stored_rows::{StoredRows, SummaryInput};
