/** Images from files, the clipboard or dropped, as data URLs, bounded in number and size. */

const MAX_IMAGES = 4;
const MAX_IMAGE_BYTES = 8 * 2 ** 20;

/** The images among files as data URLs; throws an Error that says which is too much. */
export async function read_images(files, num_there) {
	const images = [...files].filter((one) => one.type.startsWith("image/"));
	if (!images.length) return [];
	if (num_there + images.length > MAX_IMAGES) throw new Error(`${MAX_IMAGES} images at most`);
	for (const one of images) {
		if (one.size > MAX_IMAGE_BYTES) throw new Error(`${one.name || "the image"} is larger than 8 MiB`);
	}
	return Promise.all(images.map(data_url));
}

function data_url(file) {
	return new Promise((resolve, reject) => {
		const reader = new FileReader();
		reader.onload = () => resolve(reader.result);
		reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
		reader.readAsDataURL(file);
	});
}
