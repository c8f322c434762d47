//! The second launch of the grouped and online variants: from the groups' log-masses and samples to draws.

use crate::kernels::{self, Instance, KernelSource};

/// One instance, for every GPU.
pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "select.cu", serves: kernels::any, instances: || vec![instance()] };

fn instance() -> Instance {
    Instance::new(&[])
}
