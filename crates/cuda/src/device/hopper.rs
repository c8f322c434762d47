//! The Hopper kernels of a planned head, and the weight's tensor maps.

use crate::abi::{Call, Maps, TensorMap, WeightScales};
use crate::device::fused_hopper::{FusedVariant, Loaded, Tile};
use crate::device::{Device, DeviceHead, DeviceMatrix, FusedOutput, Queue, Residency, tensor_map};
use crate::error::CudaError;
use std::sync::Arc;

/// The Hopper kernels, and the weight's tensor maps.
#[derive(Debug)]
pub(crate) struct Hopper {
    kernels: Vec<Arc<Loaded>>,
    /// Other variants, each loaded at its first launch.
    variants: Vec<Arc<Loaded>>,
    weight: TensorMap,
    granule: TensorMap,
    scales: WeightScales,
}

impl Hopper {
    /// Loads the kernels for a weight that they [support](DeviceHead::suits_hopper).
    pub(crate) fn new(head: &DeviceHead, max_rows: usize, device: &Device) -> Result<Self, CudaError> {
        let weight = &head.weight;
        let tiles = Tile::up_to(max_rows, weight.dtype, FusedVariant::Plain);
        Ok(Hopper {
            kernels: tiles.map(|tile| device.kernel(tile)).collect::<Result<Vec<_>, _>>()?,
            variants: Vec::new(),
            weight: tensor_map::encode(weight, 64)?,
            granule: tensor_map::encode(weight, 16)?,
            scales: head.weight_scales(),
        })
    }

    /// The maximum number of rows of a launch.
    pub(crate) fn max_rows(&self) -> usize {
        self.kernels.last().map_or(0, |kernel| kernel.tile.columns as usize)
    }

    /// Launches the kernel for these rows, at most [`Hopper::max_rows`].
    pub(crate) fn launch(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        call: Call,
        (output, residency): (&FusedOutput, Residency),
        device: &Device,
    ) -> Result<(), CudaError> {
        let (weight, granule, scales) = (self.weight, self.granule, self.scales);
        let kernel = self.kernel(hidden.rows, output, device)?;
        let map = tensor_map::encode(hidden, kernel.tile.loaded_rows(hidden.rows))?;
        let maps = Maps { weight, granule, hidden: map, scales, padding: [0; 5] };
        let blocks = kernel.blocks(call.tokens, device.multiprocessors());
        kernel.launch(queue, blocks, call, maps, (output, residency))
    }

    /// Loads the kernels for this output, for every planned number of rows.
    pub(crate) fn prepare(&mut self, output: &FusedOutput, device: &Device) -> Result<(), CudaError> {
        let columns: Vec<usize> = self.kernels.iter().map(|kernel| kernel.tile.columns as usize).collect();
        columns.into_iter().try_for_each(|rows| self.kernel(rows, output, device).map(drop))
    }

    /// The kernel for a call of `rows` rows, at most [`Hopper::max_rows`].
    fn kernel(&mut self, rows: usize, output: &FusedOutput, device: &Device) -> Result<&Loaded, CudaError> {
        let fits = |kernel: &&Arc<Loaded>| kernel.tile.columns as usize >= rows;
        let planned = self.kernels.iter().find(fits).expect("callers have no more rows");
        if matches!(output, FusedOutput::Plain) {
            return Ok(planned);
        }
        let tile = planned.tile.with(output);
        let at = match self.variants.iter().position(|kernel| kernel.tile == tile) {
            Some(at) => at,
            None => {
                self.variants.push(device.kernel(tile)?);
                self.variants.len() - 1
            }
        };
        Ok(&self.variants[at])
    }
}
