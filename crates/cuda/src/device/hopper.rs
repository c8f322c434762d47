//! The Hopper kernels of a planned head, and the weight's tensor maps.

use crate::abi::{Call, Maps, TensorMap};
use crate::device::fused_hopper::{FusedOutput, FusedVariant, Loaded, Tile};
use crate::device::gpu::Device;
use crate::device::launch::{Queue, Residency};
use crate::device::matrix::DeviceMatrix;
use crate::device::tensor_map;
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
}

impl Hopper {
    pub(crate) fn new(weight: &DeviceMatrix, max_rows: usize, device: &Device) -> Result<Self, CudaError> {
        let tiles = Tile::up_to(max_rows, weight.dtype, FusedVariant::Plain);
        Ok(Hopper {
            kernels: tiles.map(|tile| device.kernel(tile)).collect::<Result<Vec<_>, _>>()?,
            variants: Vec::new(),
            weight: tensor_map::encode(weight, 64)?,
            granule: tensor_map::encode(weight, 16)?,
        })
    }

    /// Launches the kernel for these rows. The plan covers them.
    pub(crate) fn launch(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        call: Call,
        (output, residency): (&FusedOutput, Residency),
        device: &Device,
    ) -> Result<(), CudaError> {
        let (weight, granule) = (self.weight, self.granule);
        let kernel = self.kernel(hidden.rows, output, device)?;
        let map = tensor_map::encode(hidden, kernel.tile.loaded_rows(hidden.rows))?;
        let maps = Maps { weight, granule, hidden: map };
        let blocks = kernel.blocks(call.tokens, device.multiprocessors());
        kernel.launch(queue, blocks, call, maps, (output, residency))
    }

    /// Loads the kernels for this output, for every planned number of rows.
    pub(crate) fn prepare(&mut self, output: &FusedOutput, device: &Device) -> Result<(), CudaError> {
        let columns: Vec<usize> = self.kernels.iter().map(|kernel| kernel.tile.columns as usize).collect();
        columns.into_iter().try_for_each(|rows| self.kernel(rows, output, device).map(drop))
    }

    /// The kernel for a call of `rows` rows. The plan covers them.
    fn kernel(&mut self, rows: usize, output: &FusedOutput, device: &Device) -> Result<&Loaded, CudaError> {
        let fits = |kernel: &&Arc<Loaded>| kernel.tile.columns as usize >= rows;
        let planned = self.kernels.iter().find(fits).expect("the planned tiles reach the planned rows");
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
