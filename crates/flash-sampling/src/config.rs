//! Which sampler is wanted, as data.

use flash_sampling_core::{GroupDraw, Plan};
#[cfg(feature = "cpu")]
use flash_sampling_cpu::CpuOptions;
#[cfg(feature = "distributed")]
use flash_sampling_distributed::ShardMerge;

/// Where a sampler runs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Backend {
    /// The f64 reference: exact, slow, holds a row of logits.
    Reference,
    /// The processor.
    #[cfg(feature = "cpu")]
    Cpu(CpuOptions),
    /// The first CUDA device (`CUDA_VISIBLE_DEVICES` says which that is; the types of the module `cuda` take any); an
    /// error without the feature `cuda`.
    Cuda,
}

impl Default for Backend {
    /// The CPU with default options; without the feature `cpu` the reference.
    fn default() -> Self {
        #[cfg(feature = "cpu")]
        return Backend::Cpu(CpuOptions::default());
        #[cfg(not(feature = "cpu"))]
        return Backend::Reference;
    }
}

/// Which variant of the algorithm is run. Sizes are in tokens.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum VariantConfig {
    /// One winner per row and tile (paper Alg. 1). Pathwise.
    #[default]
    Tiled,
    /// Log-mass and local sample of each group, then a draw of the group (paper Alg. I.2). Pathwise or in distribution,
    /// by how the group is drawn.
    Grouped {
        /// Tokens of a group; a multiple of 64, but for the reference.
        size: u32,
        /// How the group is drawn.
        draw: GroupDraw,
    },
    /// Groups streamed through the binary merge (paper Alg. I.3). In distribution.
    Online {
        /// Tokens of a group; a multiple of 64, but for the reference.
        size: u32,
    },
    /// The head in near-equal shards within this process (paper Alg. I.4). Pathwise or in distribution, by the merge.
    #[cfg(feature = "distributed")]
    Sharded {
        /// Number of shards, 1 to [`MAX_SHARDS`](crate::MAX_SHARDS).
        shards: usize,
        /// How their draws become one.
        merge: ShardMerge,
    },
}

/// A backend, a variant and a plan. The default is the tiled variant on the CPU, planned for one row and one draw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackendConfig {
    /// Where it runs.
    pub backend: Backend,
    /// Which variant.
    pub variant: VariantConfig,
    /// What it is planned for.
    pub plan: Plan,
}
