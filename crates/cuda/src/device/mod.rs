//! Sampling over device memory, on the caller's stream: the entry points and their kernels.
//!
//! | entry points | kernels | shared |
//! | --- | --- | --- |
//! | `tiled` | `hopper` over `fused_hopper` and `scaled_hidden`, `shadow`; `fused_portable` | `row_features`, `gpu`, `matrix`, `head`, `tensor_map` |
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
pub(crate) mod host_counter;
pub(crate) mod launch;
pub(crate) mod launch_config;
pub(crate) mod matrix;
pub(crate) mod pinned;
pub(crate) mod results;
pub(crate) mod row_columns;
pub(crate) mod row_features;
pub(crate) mod scaled_hidden;
pub(crate) mod scratch;
pub(crate) mod select;
pub(crate) mod shadow;
pub(crate) mod standalone;
pub(crate) mod tensor_map;
pub(crate) mod tiled;

pub(crate) use alignment::{check_aligned, check_rows};
pub(crate) use fused_hopper::{FusedOutput, MAX_ROWS};
pub(crate) use fused_portable::{Epilogue, LoadedPortable, Portable, PortableOutput, Products};
pub(crate) use gpu::Device;
pub(crate) use groups::DeviceGroups;
pub(crate) use head::{DeviceHead, DeviceShadow, ShadowMemory};
pub(crate) use host_counter::HostCounter;
pub(crate) use launch::{Arguments, Entry, Grid, Kernel, Queue, Residency};
pub(crate) use launch_config::{ConfiguredKernel, launch_words};
pub(crate) use matrix::{DeviceMatrix, DeviceScales};
pub(crate) use pinned::{Pinned, page_locked};
pub(crate) use row_columns::{ListedTokens, RowColumnKernels};
pub(crate) use row_features::{KernelChoice, RowFeatures};
pub(crate) use scratch::{Scratch, wait};
pub(crate) use select::GroupRule;
pub(crate) use standalone::{DeviceDraws, DeviceStandalone};
pub(crate) use tiled::{DeviceTiled, RowsAndDraws};
