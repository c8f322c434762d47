//! The fused Hopper kernel: its tiles, its options, and its launch.

use crate::abi::{self, Call, Candidates, LogitStore, Maps, Masses, Peers, RowLists};
use crate::compile::{Architecture, Instance, KernelSource};
use crate::device::{Device, Entry, Grid, Kernel, Queue, Residency, entries, launch_words, shadow};
use crate::error::CudaError;
use core::fmt::Display;
use cudarc::driver::CudaModule;
use flash_sampling_core::DType;
use std::sync::Arc;

/// Six variants per tile and type of weight, and two variants of the tiles of candidates, for Hopper only.
pub(crate) static SOURCE: KernelSource = KernelSource {
    file: "fused_hopper.cu",
    serves,
    instances: || {
        let dtypes = [DType::BF16, DType::F16, DType::F8_E4M3, DType::I8];
        let tiles = |variant| dtypes.map(|dtype| Tile::up_to(MAX_ROWS, dtype, variant));
        [
            FusedVariant::Plain,
            FusedVariant::MasksPenalties,
            FusedVariant::Lists,
            FusedVariant::LogZ,
            FusedVariant::FanOut,
            FusedVariant::StoreLogits,
        ]
        .into_iter()
        .flat_map(tiles)
        .flatten()
        .chain(Tile::up_to(shadow::MAX_ROWS, DType::I8, FusedVariant::Candidates))
        .chain(Tile::up_to(shadow::MAX_ROWS, DType::I8, FusedVariant::ListedCandidates))
        .map(Tile::instance)
        .collect()
    },
};

/// Whether this architecture supports the kernel and the multi-GPU filters built on it.
pub(crate) fn serves(architecture: Architecture) -> bool {
    architecture == Architecture::HOPPER
}

/// Tokens of a granule, the unit of work that blocks share.
const GRANULE: u32 = 16;

/// The maximum number of rows of a launch.
pub(crate) const MAX_ROWS: usize = 256;

/// The results that an instance computes besides the plain draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FusedVariant {
    /// Nothing.
    Plain,
    /// Supports rows with penalties, applies masks before it computes scores, and stores raw logits on request.
    MasksPenalties,
    /// Supports the same rows, and lists the largest logits of rows with filters.
    Lists,
    /// Computes log Z of rows with neither masks nor biases.
    LogZ,
    /// Sends its draws to the other ranks.
    FanOut,
    /// Stores the raw logits and the largest logit of each granule, for rows without masks and biases.
    StoreLogits,
    /// Lists the tokens that can win, by a shadow of the weight. Supports the rows of `MasksPenalties`.
    Candidates,
    /// As `Candidates`, and lists the largest logits of rows with filters by their upper bounds.
    ListedCandidates,
}

impl FusedVariant {
    /// Whether the weight of the kernel is a shadow.
    fn is_of_shadow(self) -> bool {
        matches!(self, FusedVariant::Candidates | FusedVariant::ListedCandidates)
    }
}

/// The output of a variant besides the draws.
#[allow(clippy::large_enum_variant)] // one per launch, passed by reference
#[derive(Clone, Copy, Debug)]
pub(crate) enum FusedOutput {
    /// Nothing.
    Plain,
    /// Raw logits, or nothing.
    MasksPenalties(LogitStore),
    /// The largest logits of rows with filters.
    Lists(RowLists),
    /// Masses and log Z.
    LogZ(Masses),
    /// The mailboxes of the other ranks.
    FanOut(Peers),
    /// Raw logits, and the largest logit of each granule.
    StoreLogits(LogitStore),
    /// The lists of candidates.
    Candidates(Candidates),
    /// The lists of candidates, and the cutoffs of rows with filters.
    ListedCandidates(Candidates, RowLists),
}

impl FusedOutput {
    fn variant(&self) -> FusedVariant {
        match self {
            FusedOutput::Plain => FusedVariant::Plain,
            FusedOutput::MasksPenalties(_) => FusedVariant::MasksPenalties,
            FusedOutput::Lists(_) => FusedVariant::Lists,
            FusedOutput::LogZ(_) => FusedVariant::LogZ,
            FusedOutput::FanOut(_) => FusedVariant::FanOut,
            FusedOutput::StoreLogits(_) => FusedVariant::StoreLogits,
            FusedOutput::Candidates(_) => FusedVariant::Candidates,
            FusedOutput::ListedCandidates(..) => FusedVariant::ListedCandidates,
        }
    }

    /// Whether the launch draws and has no other output.
    pub(crate) fn is_draw(&self) -> bool {
        match self {
            FusedOutput::Plain => true,
            FusedOutput::MasksPenalties(stored) => stored.logits.is_null(),
            _ => false,
        }
    }
}

/// One instance of the kernel. The fields have the names of the template's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    /// The maximum number of rows.
    pub(crate) columns: u32,
    slabs: u32,
    pub(crate) cluster: u32,
    /// The type of the weight.
    pub(crate) dtype: DType,
    variant: FusedVariant,
}

/// Columns, slabs and cluster, for up to 8, 16, ... 256 rows.
///
/// Two slabs per stage read weight rows in runs of 256 bytes, which is faster if the launch is memory-bound. The two
/// blocks of a cluster share the hidden states.
const TILES: [[u32; 3]; 9] =
    [[8, 2, 1], [16, 2, 1], [32, 2, 1], [64, 2, 2], [96, 2, 2], [128, 1, 2], [192, 1, 2], [224, 1, 2], [256, 1, 2]];

/// Columns, slabs and cluster for a weight in fp8 or int8. Calls with more rows use the portable kernel, whose sums
/// have the same bits.
const SCALED_TILES: [[u32; 3]; 4] = [[8, 2, 1], [32, 2, 1], [64, 1, 2], [128, 1, 2]];

/// Columns, slabs and cluster for candidates, whose rows have two columns of products each.
const CANDIDATE_TILES: [[u32; 3]; 5] = [[8, 2, 1], [16, 2, 1], [32, 2, 1], [64, 2, 2], [96, 1, 2]];

impl Tile {
    /// The tiles for calls of up to `rows` rows, smallest first.
    pub(crate) fn up_to(rows: usize, dtype: DType, variant: FusedVariant) -> impl Iterator<Item = Tile> {
        let tiles = match dtype {
            _ if variant.is_of_shadow() => &CANDIDATE_TILES[..],
            DType::F8_E4M3 | DType::I8 => &SCALED_TILES,
            _ => &TILES,
        };
        let largest = tiles.iter().position(|tile| tile[0] as usize >= rows).unwrap_or(tiles.len() - 1);
        let tile = move |[columns, slabs, cluster]: [u32; 3]| Tile { columns, slabs, cluster, dtype, variant };
        tiles[..=largest].iter().copied().map(tile)
    }

    /// The rows of the batch that each block of a cluster loads, as in schedule.cuh.
    pub(crate) fn loaded_rows(self, rows: usize) -> u32 {
        let loads_all = self.columns == 256;
        let rows = if loads_all { self.columns } else { rows as u32 };
        rows.div_ceil(8 * self.cluster) * 8
    }

    /// The number of units of a tile. A unit has 64 tokens and a warpgroup of consumers. Tiles of three units read the
    /// hidden states less often.
    fn units(self) -> u32 {
        if self.has_scales() && self.columns >= 64 { 3 } else { 2 }
    }

    /// Whether the weight is in fp8 or int8, so that the kernel converts its elements. A shadow is no such weight.
    fn has_scales(self) -> bool {
        self.dtype.is_scaled() && !self.variant.is_of_shadow()
    }

    /// The same tile in the variant of an output.
    pub(crate) fn with(self, output: &FusedOutput) -> Tile {
        Tile { variant: output.variant(), ..self }
    }

    fn instance(self) -> Instance {
        let operand = match self.dtype {
            _ if self.variant.is_of_shadow() => "S8",
            dtype if dtype.is_scaled() => "BF16", // no effect: each launch selects f16 or bf16
            dtype => abi::element_name(dtype),
        };
        let weight: &dyn Display = &abi::element_name(self.dtype);
        let plain: [(_, &dyn Display); 5] = [
            ("COLUMNS", &self.columns),
            ("SLABS", &self.slabs),
            ("CLUSTER", &self.cluster),
            ("UNITS", &self.units()),
            ("OPERAND", &operand),
        ];
        let variant: &[_] = match self.variant {
            FusedVariant::Plain => &[],
            FusedVariant::MasksPenalties => &["MASKS_PENALTIES"],
            FusedVariant::Lists => &["LISTS"],
            FusedVariant::LogZ => &["LOG_Z"],
            FusedVariant::FanOut => &["FAN_OUT"],
            FusedVariant::StoreLogits => &["STORE_LOGITS"],
            FusedVariant::Candidates => &["CANDIDATES"],
            FusedVariant::ListedCandidates => &["CANDIDATES", "LISTS"],
        };
        let weight = self.has_scales().then_some(("WEIGHT", weight));
        let flags = variant.iter().map(|&name| (name, &1 as &dyn Display));
        Instance::new(&plain.into_iter().chain(weight).chain(flags).collect::<Vec<_>>())
    }

    pub(crate) fn load(self, device: &Device) -> Result<Loaded, CudaError> {
        let module = device.module(&SOURCE, &self.instance())?;
        let [shared_bytes, threads] = launch_words(&module, "fused_hopper_launch", device)?;
        fn load<A>(module: &Arc<CudaModule>, entry: &Entry<A>, shared_bytes: u32) -> Result<Kernel<A>, CudaError> {
            Kernel::load(module, entry)?.with_shared(shared_bytes)
        }
        let kernel = match self.variant {
            FusedVariant::Plain => HopperKernel::Plain(load(&module, &entries::FUSED_HOPPER, shared_bytes)?),
            FusedVariant::MasksPenalties | FusedVariant::StoreLogits => {
                HopperKernel::Stores(load(&module, &entries::FUSED_HOPPER_STORES, shared_bytes)?)
            }
            FusedVariant::Lists => HopperKernel::Lists(load(&module, &entries::FUSED_HOPPER_LISTS, shared_bytes)?),
            FusedVariant::LogZ => HopperKernel::LogZ(load(&module, &entries::FUSED_HOPPER_LOG_Z, shared_bytes)?),
            FusedVariant::FanOut => HopperKernel::FanOut(load(&module, &entries::FUSED_HOPPER_FAN_OUT, shared_bytes)?),
            FusedVariant::Candidates => {
                HopperKernel::Candidates(load(&module, &entries::FUSED_HOPPER_CANDIDATES, shared_bytes)?)
            }
            FusedVariant::ListedCandidates => {
                let entry = &entries::FUSED_HOPPER_LISTED_CANDIDATES;
                HopperKernel::ListedCandidates(load(&module, entry, shared_bytes)?)
            }
        };
        Ok(Loaded { tile: self, kernel, shared_bytes, threads })
    }
}

/// A kernel, with the output type of its variant.
#[derive(Debug)]
enum HopperKernel {
    Plain(Kernel<(Call, Maps)>),
    Stores(Kernel<(Call, Maps, LogitStore)>),
    Lists(Kernel<(Call, Maps, RowLists)>),
    LogZ(Kernel<(Call, Maps, Masses)>),
    FanOut(Kernel<(Call, Maps, Peers)>),
    Candidates(Kernel<(Call, Maps, Candidates)>),
    ListedCandidates(Kernel<(Call, Maps, Candidates, RowLists)>),
}

#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) tile: Tile,
    kernel: HopperKernel,
    shared_bytes: u32,
    threads: u32,
}

impl Loaded {
    /// The number of blocks for `tokens` tokens: at most one per multiprocessor, each with at least one granule.
    pub(crate) fn blocks(&self, tokens: u32, multiprocessors: u32) -> u32 {
        let cluster = self.tile.cluster;
        (multiprocessors / cluster).min(tokens.div_ceil(GRANULE).div_ceil(cluster)) * cluster
    }

    /// Launches the kernel with an output of this tile's variant ([`Tile::with`]).
    ///
    /// `call` has at least one row and one token, and at most as many rows as the tile has columns. The scratch is in
    /// the state that abi.cuh requires between launches.
    pub(crate) fn launch(
        &self,
        queue: Queue<'_>,
        blocks: u32,
        call: Call,
        maps: Maps,
        (output, residency): (&FusedOutput, Residency),
    ) -> Result<(), CudaError> {
        let grid = Grid { shared_bytes: self.shared_bytes, residency, ..Grid::of(blocks, self.threads) };
        match (&self.kernel, *output) {
            (HopperKernel::Plain(kernel), FusedOutput::Plain) => queue.launch(kernel, grid, (call, maps)),
            (HopperKernel::Stores(kernel), FusedOutput::MasksPenalties(to) | FusedOutput::StoreLogits(to)) => {
                queue.launch(kernel, grid, (call, maps, to))
            }
            (HopperKernel::Lists(kernel), FusedOutput::Lists(to)) => queue.launch(kernel, grid, (call, maps, to)),
            (HopperKernel::LogZ(kernel), FusedOutput::LogZ(to)) => queue.launch(kernel, grid, (call, maps, to)),
            (HopperKernel::FanOut(kernel), FusedOutput::FanOut(to)) => queue.launch(kernel, grid, (call, maps, to)),
            (HopperKernel::Candidates(kernel), FusedOutput::Candidates(to)) => {
                queue.launch(kernel, grid, (call, maps, to))
            }
            (HopperKernel::ListedCandidates(kernel), FusedOutput::ListedCandidates(to, lists)) => {
                queue.launch(kernel, grid, (call, maps, to, lists))
            }
            _ => Err(CudaError::Corrupt { what: "a kernel of another variant" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulated::{self, Input};

    #[test]
    fn tiles_cover_a_plan() {
        let columns = |rows| Tile::up_to(rows, DType::BF16, FusedVariant::Plain).map(|t| t.columns).collect::<Vec<_>>();
        assert_eq!(columns(1), [8]);
        assert_eq!(columns(17), [8, 16, 32]);
        assert_eq!([65, 97, 129, 193].map(|rows| columns(rows).last().copied()), [96, 128, 192, 224].map(Some));
        assert_eq!(columns(256).last(), Some(&256));
        assert_eq!(columns(1000).last(), Some(&256));
        for dtype in [DType::F8_E4M3, DType::I8] {
            let scaled = |rows| Tile::up_to(rows, dtype, FusedVariant::Plain).last().map(|t| t.columns);
            assert_eq!([1, 9, 33, 256].map(scaled), [8, 32, 64, 128].map(Some));
        }
    }

    fn tiles() -> impl Iterator<Item = Tile> {
        Tile::up_to(256, DType::BF16, FusedVariant::Plain)
    }

    /// The swizzle needs whole groups of eight rows. They contain all rows of the batch, and no row beyond the tile.
    #[test]
    fn a_cluster_loads_the_batch_and_no_more_than_the_tile() {
        for tile in tiles() {
            for rows in 1..=tile.columns {
                let (each, columns) = (tile.loaded_rows(rows as usize), tile.columns);
                let all = each * tile.cluster;
                assert!(each.is_multiple_of(8) && (rows..=columns).contains(&all), "{rows} rows of {columns}: {all}");
            }
        }
    }

    /// Otherwise the boxes of the host have another size than the loads that the kernel waits for.
    #[test]
    fn kernel_and_host_agree_on_the_number_of_loaded_rows() {
        let Some(program) = emulated::program("loaded_rows") else { return };
        let cases: Vec<_> = tiles().flat_map(|tile| (1..=256).map(move |rows| (tile, rows))).collect();
        let mut input = Input::default();
        input.put_all(cases.iter().map(|(tile, rows)| [tile.columns, tile.cluster, *rows]));
        let mut output = emulated::answer(&program, input);
        let found: Vec<u32> = output.list(cases.len());
        assert!(output.is_empty());
        for ((tile, rows), found) in cases.into_iter().zip(found) {
            assert_eq!(tile.loaded_rows(rows as usize), found, "{rows} rows of {tile:?}");
        }
    }
}
