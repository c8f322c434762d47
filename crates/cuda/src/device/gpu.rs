//! A GPU, its context, and its loaded kernels.
#![allow(unsafe_code)]

use crate::compile::{Architecture, Instance, KernelSource, Request};
use crate::device::fused_hopper::{Loaded, Tile};
use crate::device::{Entry, Kernel, LoadedPortable, Portable};
use crate::error::CudaError;
use core::fmt;
use cudarc::driver::sys::{CUdevice_attribute, CUresult};
use cudarc::driver::{CudaContext, CudaModule, CudaStream};
use cudarc::nvrtc::Ptx;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The GPUs in use in this process; their contexts and kernels live as long as the process.
static DEVICES: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());

/// A GPU, its context, and its loaded kernels.
pub struct Device {
    ordinal: usize,
    context: Arc<CudaContext>,
    /// Allocates and frees scratch. A kernel that waits for other ranks blocks one of the few hardware queues.
    scratch: Arc<CudaStream>,
    capability: (i32, i32),
    multiprocessors: u32,
    kernels: Mutex<HashMap<Tile, Arc<Loaded>>>,
    portable: Mutex<HashMap<Portable, Arc<LoadedPortable>>>,
    modules: Mutex<HashMap<(&'static str, String), Arc<CudaModule>>>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("ordinal", &self.ordinal).field("capability", &self.capability).finish()
    }
}

impl Device {
    /// Opens the GPU with this ordinal, from 0, with its primary context. Equal ordinals return the same device.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] if the driver's library or the GPU is missing; [`CudaError::Driver`]. The compiler's
    /// library is loaded only to compile a kernel that no cache folder has (see [`cache`](crate::cache)).
    pub fn new(ordinal: usize) -> Result<Arc<Device>, CudaError> {
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.iter().find(|device| device.ordinal == ordinal) {
            return Ok(device.clone());
        }
        let count = Device::count()?;
        if ordinal >= count {
            return Err(CudaError::unavailable(format!("there is no GPU {ordinal}: from 0 this process sees {count}")));
        }
        let context = CudaContext::new(ordinal).map_err(CudaError::driver("make a context"))?;
        let of_device = CudaError::driver("describe the GPU");
        let capability = context.compute_capability().map_err(&of_device)?;
        let multiprocessors =
            context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map_err(&of_device)? as u32;
        let scratch = context.new_stream().map_err(CudaError::driver("make a stream"))?;
        let (kernels, portable, modules) = (Mutex::default(), Mutex::default(), Mutex::default());
        let device =
            Arc::new(Device { ordinal, context, scratch, capability, multiprocessors, kernels, portable, modules });
        devices.push(device.clone());
        Ok(device)
    }

    /// The number of GPUs that the driver shows this process.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] if the driver's library is missing or there is no GPU; [`CudaError::Driver`].
    pub fn count() -> Result<usize, CudaError> {
        #[cfg(not(feature = "linked"))]
        // SAFETY: loads a library by its well-known names; its initialisers are NVIDIA's.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(CudaError::unavailable("the driver library libcuda cannot be loaded"));
        }
        cudarc::driver::result::init().map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_NO_DEVICE => CudaError::unavailable("the driver shows this process no GPU"),
            CUresult::CUDA_ERROR_STUB_LIBRARY => CudaError::unavailable("libcuda is the toolkit's stub"),
            _ => CudaError::driver("start")(error),
        })?;
        let count = CudaContext::device_count().map_err(CudaError::driver("count the GPUs"))?;
        Ok(count as usize)
    }

    /// The GPU's name.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn name(&self) -> Result<String, CudaError> {
        self.context.name().map_err(CudaError::driver("name the GPU"))
    }

    /// The compute capability, major and minor.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// The number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// The context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The stream on which all scratch is allocated and freed.
    pub(crate) fn scratch_stream(&self) -> &Arc<CudaStream> {
        &self.scratch
    }

    pub(crate) fn stream(&self) -> Result<Arc<CudaStream>, CudaError> {
        self.context.new_stream().map_err(CudaError::driver("make a stream"))
    }

    /// The compilation target of kernels for this GPU.
    pub fn architecture(&self) -> Architecture {
        Architecture::of_capability(self.capability)
    }

    /// Finds or compiles an instance of a kernel, and loads it. The device does not keep the module.
    pub(crate) fn module(&self, kernel: &KernelSource, instance: &Instance) -> Result<Arc<CudaModule>, CudaError> {
        debug_assert!((kernel.instances)().contains(instance), "{} {instance} is in no list", kernel.file);
        let code = Request { kernel, instance, architecture: self.architecture() }.machine_code()?;
        self.context.load_module(Ptx::from_binary(code)).map_err(CudaError::driver("load a kernel"))
    }

    /// A kernel of an instance, compiled and loaded at first use. The device keeps the kernel.
    pub(crate) fn function<A>(
        &self,
        kernel: &'static KernelSource,
        instance: &Instance,
        entry: &Entry<A>,
    ) -> Result<Kernel<A>, CudaError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (kernel.file, instance.to_string());
        let module = match modules.get(&key) {
            Some(module) => module.clone(),
            None => modules.entry(key).or_insert(self.module(kernel, instance)?).clone(),
        };
        // A thread may have no current context; only the load of a module binds one.
        self.context.bind_to_thread().map_err(CudaError::driver("load a kernel"))?;
        Kernel::load(&module, entry)
    }

    /// A portable kernel, compiled and loaded at first use.
    pub(crate) fn portable(&self, instance: Portable) -> Result<Arc<LoadedPortable>, CudaError> {
        let mut portable = self.portable.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = portable.get(&instance) {
            return Ok(loaded.clone());
        }
        let loaded = Arc::new(instance.load(self)?);
        portable.insert(instance, loaded.clone());
        Ok(loaded)
    }

    /// A Hopper kernel, compiled and loaded at first use.
    pub(crate) fn kernel(&self, tile: Tile) -> Result<Arc<Loaded>, CudaError> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = kernels.get(&tile) {
            return Ok(loaded.clone());
        }
        let loaded = Arc::new(tile.load(self)?);
        kernels.insert(tile, loaded.clone());
        Ok(loaded)
    }
}
